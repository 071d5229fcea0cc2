"""FP8 with a float32 scale for each 1×128 or 128×128 values."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from quaver.kernels import block_cast, block_dequantize
from quaver.kernels.scaled_mm.layouts import BLOCK_1D, BLOCK_2D
from quaver.tensors.block import BlockTensor
from quaver.tensors.payload import Operand, Quantized, paired


class Float8BlockwiseTensor(BlockTensor):
    """x ≈ data * scale_inv of its block; a short last block where 128 does not divide a side.

    With M the product of x's leading dimensions, K the last one, and B = 128:

    Attributes:
        rowwise_data: [M, K] in torch.float8_e4m3fn or torch.float8_e5m2, or None.
        rowwise_scale_inv: float32 [M, ceil(K/B)]; with blocks of two dimensions
            [ceil(M/B), ceil(K/B)]; or None.
        columnwise_data: [K, M], or None; with blocks of one dimension its values differ from the
            row-wise ones, since they have other scales.
        columnwise_scale_inv: float32 [K, ceil(M/B)]; with blocks of two dimensions
            [ceil(K/B), ceil(M/B)]; or None.
        payload_layout: "block_1d" or "block_2d".

    Without a quantizer, writing to it rounds the scales to powers of two.
    """

    layouts: ClassVar[tuple[str, ...]] = (BLOCK_1D, BLOCK_2D)
    side: ClassVar[int] = 128
    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None

    @property
    def _block_dim(self) -> int:
        return 2 if self.two_dimensional else 1

    def values_of(self, operand: Operand, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operand stands for."""
        parts: tuple[Any, ...] = (operand.data, operand.scale_inv)
        values: torch.Tensor = block_dequantize(*parts, self._block_dim, dtype)
        return values

    def turned(self, operand: Operand, width: int) -> Operand | None:
        """The transpose, if its blocks are the same."""
        if not self.two_dimensional or operand.scale_inv is None:
            return None
        return operand._replace(data=operand.data.t(), scale_inv=operand.scale_inv.t())

    def cast_alone(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize with scales that are powers of two."""
        options = (self.fp8_dtype, self._block_dim, True, 0.0)
        return paired(block_cast(rows, *options, rowwise, columnwise), self.payload_layout)
