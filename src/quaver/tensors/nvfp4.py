"""NVFP4: 4-bit values under two levels of scales."""

from __future__ import annotations

from typing import ClassVar

import torch

from quaver.kernels import hadamard, nvfp4_cast, nvfp4_dequantize
from quaver.kernels.hadamard.reference import SIGNS
from quaver.kernels.nvfp4_cast.e2m1 import pack, unpack
from quaver.kernels.scaled_mm.layouts import NVFP4, NVFP4_2D
from quaver.tensors.block import BlockTensor
from quaver.tensors.payload import Operand, Quantized, paired


class NVFP4Tensor(BlockTensor):
    """x ≈ data * scale_inv of its block * global_scale_inv; short last blocks at ragged edges.

    With M the product of x's leading dimensions and K the last one:

    Attributes:
        rowwise_data: uint8 [M, ceil(K/2)], two E2M1 values a byte, the one with the even index in
            the low four bits; or None.
        rowwise_scale_inv: torch.float8_e4m3fn [M, ceil(K/16)]; with blocks of two dimensions
            [ceil(M/16), ceil(K/16)]; or None.
        rowwise_global_scale_inv: float32 [1], or None.
        columnwise_data: uint8 [K, ceil(M/2)], or None. After the Hadamard transform M counts as the
            next multiple of 16.
        columnwise_scale_inv: torch.float8_e4m3fn [K, ceil(M/16)]; with blocks of two dimensions
            [ceil(K/16), ceil(M/16)]; or None.
        columnwise_global_scale_inv: float32 [1], or None; it differs from the row-wise one after
            the Hadamard transform.
        payload_layout: "nvfp4" or "nvfp4_2d".
        hadamard: whether the column-wise copy went through the Hadamard transform. `dequantize()`
            of a tensor with that copy alone undoes it.

    Without a quantizer, writing to it rounds to nearest.
    """

    layouts: ClassVar[tuple[str, ...]] = (NVFP4, NVFP4_2D)
    part_names: ClassVar[tuple[str, ...]] = (
        "rowwise_data",
        "rowwise_scale_inv",
        "rowwise_global_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
        "columnwise_global_scale_inv",
    )
    side: ClassVar[int] = 16
    values_per_byte: ClassVar[int] = 2
    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    rowwise_global_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    columnwise_global_scale_inv: torch.Tensor | None

    @property
    def format(self) -> str:
        """The payload's format."""
        return "E2M1"

    @property
    def global_scale_inv(self) -> torch.Tensor | None:
        """The global scale of the row-wise copy, where there is one, else of the other."""
        top = self.rowwise_global_scale_inv
        return self.columnwise_global_scale_inv if top is None else top

    def values_of(self, operand: Operand, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operand stands for, with the Hadamard transform undone."""
        parts = (operand.data, operand.scale_inv, operand.global_scale_inv, self.two_dimensional)
        if not self.hadamard or operand.data is not self.columnwise_data:
            values: torch.Tensor = nvfp4_dequantize(*parts, width, dtype)
            return values
        padded = 2 * operand.data.shape[1]
        transformed = nvfp4_dequantize(*parts, padded, torch.float32)
        signs = torch.tensor(SIGNS, dtype=torch.float32, device=self.device)
        signs = signs.repeat(padded // len(SIGNS))
        # y = (x * signs) @ H, where H is its own inverse: the signs cancel those of `hadamard`.
        undone: torch.Tensor = hadamard(transformed * signs) * signs
        return undone[:, :width].to(dtype)

    def turned(self, operand: Operand, width: int) -> Operand | None:
        """The transpose, if its blocks are the same."""
        if not self.two_dimensional or self.hadamard or operand.scale_inv is None:
            return None
        codes = unpack(operand.data)[:, :width].t()
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).contiguous()
        return operand._replace(data=pack(codes), scale_inv=operand.scale_inv.t())

    def cast_alone(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize, rounding to nearest."""
        options = (self.two_dimensional, False, 0, 0)
        if not (self.hadamard and columnwise):
            return paired(nvfp4_cast(rows, *options, rowwise, columnwise), self.payload_layout)
        transformed = hadamard(rows.t()).t()
        columns = paired(nvfp4_cast(transformed, *options, False, True), self.payload_layout)
        return (
            self.cast_alone(rows, True, False)._replace(columnwise=columns.columnwise)
            if rowwise
            else columns
        )
