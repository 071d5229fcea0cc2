"""`block_cast` and `block_dequantize` in Triton."""

from __future__ import annotations

import torch

from quaver.kernels.block_cast.blocks import Results
from quaver.kernels.block_cast.reference import SIDE, block_of
from quaver.kernels.block_cast.triton_tiles import (
    ANY,
    POWER_2,
    Tile,
    cast_blocks,
    dequantize_blocks,
)

TILE = Tile(side=SIDE, warps=8, registers=128)
"""With no more registers two programs fit a multiprocessor: one loads while the other computes."""


def block_cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_dim: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> Results:
    """As the reference."""
    rule = (POWER_2 if power_2 else ANY).value
    return cast_blocks(x, dtype, block_of(block_dim), rule, epsilon, (rowwise, columnwise), TILE)


def block_dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, block_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """As the reference."""
    return dequantize_blocks(data, scale_inv, block_of(block_dim), ANY.value, dtype)
