"""The norms as fusible operations."""

from __future__ import annotations

import torch

from quaver.errors import QuaverError
from quaver.functional import dequantized
from quaver.nn.attention.head_norm import L2Normalization as L2NormalizationModule
from quaver.nn.norm import LayerNorm as LayerNormModule
from quaver.nn.norm import RMSNorm as RMSNormModule
from quaver.ops.operation import FusibleOperation


class LayerNorm(LayerNormModule, FusibleOperation):
    """`quaver.LayerNorm` as a fusible operation, with the same arguments."""


class RMSNorm(RMSNormModule, FusibleOperation):
    """`quaver.RMSNorm` as a fusible operation, with the same arguments."""


class L2Normalization(L2NormalizationModule, FusibleOperation):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, in float32 arithmetic.

    Args:
        eps: added to the sum of squares.

    Raises:
        QuaverError: `eps` is below 0.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        if not eps >= 0:
            raise QuaverError(f"eps must be at least 0, not {eps}")
        super().__init__(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] over its length, in its dtype.

        Raises:
            QuaverError: x is a scalar.
        """
        if x.dim() == 0:
            raise QuaverError("x must have at least one dimension, over which the norm goes")
        return super().forward(dequantized(x))

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"eps={self.eps}"
