"""MXFP8: FP8 with a power-of-two scale (E8M0) for each 32 values."""

from __future__ import annotations

from typing import ClassVar

import torch

from quaver.kernels import mx_cast, mx_dequantize
from quaver.kernels.scaled_mm.layouts import MX
from quaver.tensors.block import BlockTensor
from quaver.tensors.payload import Operand, Quantized, paired


class MXFP8Tensor(BlockTensor):
    """x ≈ data * scale_inv of its block; a short last block where 32 does not divide a side.

    With M the product of x's leading dimensions and K the last one:

    Attributes:
        rowwise_data: [M, K] in torch.float8_e4m3fn or torch.float8_e5m2, or None.
        rowwise_scale_inv: torch.float8_e8m0fnu [M, ceil(K/32)], or None.
        columnwise_data: [K, M], or None; its values differ from the row-wise ones, since they have
            other scales.
        columnwise_scale_inv: torch.float8_e8m0fnu [K, ceil(M/32)], or None.
    """

    layouts: ClassVar[tuple[str, ...]] = (MX,)
    side: ClassVar[int] = 32
    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None

    def values_of(self, operand: Operand, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operand stands for."""
        values: torch.Tensor = mx_dequantize(operand.data, operand.scale_inv, dtype)
        return values

    def cast_alone(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize, which has no options in this format."""
        return paired(mx_cast(rows, self.fp8_dtype, rowwise, columnwise), self.payload_layout)
