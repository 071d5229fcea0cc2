"""`hadamard` in Triton: each thread holds a block of 16 and adds in the order of the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import widened
from quaver.kernels.hadamard.reference import BLOCK, SIGNS

ROWS, BLOCKS, WARPS = 16, 8, 4
"""Of a tile, which has BLOCKS * 16 columns."""

_NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)


@triton.jit
def _step(x):
    """Sums and differences over the last dimension, of 2, which becomes the first of the four."""
    a, b = tl.split(x)
    return tl.permute(tl.join(a + b, a - b), (0, 4, 1, 2, 3))


@triton.jit
def _hadamard(
    x,
    y,
    rows,
    columns,
    row_stride,
    column_stride,
    NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    width: tl.constexpr = BLOCKS * BLOCK
    across = tl.cdiv(columns, width)
    r = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, width)
    c = (tl.program_id(0) % across).to(tl.int64) * width + i
    at = x + r[:, None] * row_stride + c[None, :] * column_stride
    loaded = tl.load(at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    sign = 1.0 - 2.0 * ((NEGATIVE >> (i % BLOCK)) & 1).to(tl.float32)
    values = widened(loaded) * sign[None, :]
    values = tl.reshape(values, (ROWS * BLOCKS, 2, 2, 2, 2))
    # Four steps bring the dimensions back into their order: those of the strides 1, 2, 4 and 8.
    values = _step(_step(_step(_step(values)))) * 0.25
    padded = tl.cdiv(columns, BLOCK) * BLOCK
    held = (r < rows)[:, None] & (c < padded)[None, :]
    tl.store(y + r[:, None] * padded + c[None, :], tl.reshape(values, (ROWS, width)), mask=held)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    rows, columns = x.shape
    padded = cdiv(columns, BLOCK) * BLOCK
    y = torch.empty((rows, padded), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    launch_grid(
        _hadamard,
        (cdiv(rows, ROWS) * cdiv(columns, BLOCKS * BLOCK),),
        x,
        y,
        rows,
        columns,
        *x.stride(),
        NEGATIVE=_NEGATIVE,
        BLOCK=BLOCK,
        ROWS=ROWS,
        BLOCKS=BLOCKS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return y
