"""Casting to FP8 with a float32 scale for each block of 1x128 or 128x128, as a specification."""

import torch

from quaver.formats import MAX
from quaver.kernels.block_cast.blocks import Block, Results, cast_usages, dequantize_blocks
from quaver.kernels.cast.reference import divide
from quaver.kernels.current_cast.reference import current_scale

SIDE = 128
"""Values along a side of a block."""


def block_of(block_dim: int) -> Block:
    """Rows and columns of a block that spreads over 1 or 2 dimensions.

    Raises:
        ValueError: `block_dim` is another number.
    """
    if block_dim not in (1, 2):
        raise ValueError(
            f"block_dim must be 1 (blocks of 1x{SIDE}) or 2 ({SIDE}x{SIDE}), not {block_dim}"
        )
    return (1, SIDE) if block_dim == 1 else (SIDE, SIDE)


def block_cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_dim: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> Results:
    """q = saturate(x * scale), rounded to nearest even; NaN stays NaN (positive), inf saturates.

    scale = `current_scale` of the block's amax, which passes over NaN. The last block of a row or
    a column may be short. The column-wise results are the row-wise ones of x's transpose.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_dim: 1: a scale for 128 values of a row; 2: for 128x128 values.
        power_2: round the scales down to powers of two.
        epsilon: an amax counts as at least this much.
        rowwise: whether the row-wise results are wanted.
        columnwise: whether the column-wise results are wanted.

    Returns:
        Payload [M, K] in `dtype`; scale_inv = 1 / scale, float32 [M, ceil(K / 128)], with 2
        dimensions [ceil(M / 128), ceil(K / 128)]; column-wise payload [K, M]; its scale_inv
        [K, ceil(M / 128)], with 2 dimensions [ceil(K / 128), ceil(M / 128)]. All contiguous; empty
        where not asked for.

    Raises:
        ValueError: `block_dim` is neither 1 nor 2.
    """

    def rule(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = current_scale(amax, MAX[dtype], power_2, epsilon)
        return scale, divide(1.0, scale)

    block = block_of(block_dim)
    return cast_usages(x, dtype, block, rule, torch.float32, (rowwise, columnwise))


def block_dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, block_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """x = q * scale_inv, computed in float32, rounded once to `dtype`.

    Args:
        data: [M, K], an FP8 dtype, any strides. Column-wise results give the transpose of x.
        scale_inv: float32, as `block_cast` gave it with `data`.
        block_dim: 1 or 2, as in `block_cast`.
        dtype: of the result [M, K], which is contiguous.

    Raises:
        ValueError: `block_dim` is neither 1 nor 2.
    """
    return dequantize_blocks(data, scale_inv, block_of(block_dim), dtype)
