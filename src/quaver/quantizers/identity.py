"""No quantization, where a recipe asks for a quantizer."""

from __future__ import annotations

from typing import Any

import torch

from quaver.kernels.scaled_mm.layouts import PLAIN
from quaver.quantizers.base import Draw, Quantizer
from quaver.tensors import Operand, Quantized, QuantizedTensor


class IdentityQuantizer(Quantizer):
    """Leaves tensors in high precision; a call returns what it was given."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] itself, and its transpose."""
        return Quantized(
            Operand(x, None, PLAIN) if rowwise else None,
            Operand(x.t(), None, PLAIN) if columnwise else None,
        )

    def wrap(self, quantized: Quantized, like: torch.Tensor) -> QuantizedTensor:
        """There is nothing to wrap."""
        raise NotImplementedError("an IdentityQuantizer makes no quantized tensor")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x itself."""
        return x
