"""The norms of a transformer by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quaver.nn.norm import LayerNorm, RMSNorm


@dataclass(frozen=True)
class NormKind:
    """Which norm, as users of transformers say it.

    Args:
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance or the mean square.
        zero_centered_gamma: 1 + weight multiplies.
    """

    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f'normalization must be "LayerNorm" or "RMSNorm", not {self.normalization!r}'
            )

    def make(
        self,
        size: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """The module for vectors of `size` features."""
        kind = LayerNorm if self.normalization == "LayerNorm" else RMSNorm
        return kind(
            size,
            eps=self.eps,
            device=device,
            dtype=dtype,
            zero_centered_gamma=self.zero_centered_gamma,
        )
