"""`mx_cast` and `mx_dequantize` in Triton."""

from __future__ import annotations

import torch

from quaver.kernels.block_cast.blocks import Results
from quaver.kernels.block_cast.triton_tiles import E8M0, Tile, cast_blocks, dequantize_blocks
from quaver.kernels.mx_cast.reference import BLOCK

TILE = Tile(side=64, warps=4, registers=128)


def mx_cast(x: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Results:
    """As the reference."""
    row, row_scale, col, col_scale = cast_blocks(
        x, dtype, BLOCK, E8M0.value, 0.0, (rowwise, columnwise), TILE
    )
    return row, row_scale.view(torch.float8_e8m0fnu), col, col_scale.view(torch.float8_e8m0fnu)


def mx_dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the reference."""
    return dequantize_blocks(data, scale_inv.view(torch.uint8), BLOCK, E8M0.value, dtype)
