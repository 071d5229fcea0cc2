"""The second stage of sums over columns: partial sums in a fixed order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import narrowed

PARTS_A_STEP = 32
COLUMNS_A_PROGRAM = 64


@triton.jit(do_not_specialize=["parts"])
def _sum_parts(
    partial, into, parts, columns, NATIVE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([STEP, BLOCK], tl.float32)
    for start in range(0, parts, STEP):
        part = start + tl.arange(0, STEP)
        offsets = part[:, None].to(tl.int64) * columns + column[None, :]
        mask = (part < parts)[:, None] & inside[None, :]
        total += tl.load(partial + offsets, mask=mask, other=0.0)
    result = narrowed(tl.sum(total, 0), into.dtype.element_ty, NATIVE)
    tl.store(into + column, result, mask=inside)


def sum_parts(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The column sums [K] in `dtype` of partial sums, float32 [parts, K], contiguous."""
    parts, columns = partial.shape
    into = torch.empty(columns, dtype=dtype, device=partial.device)
    launch_grid(
        _sum_parts,
        (cdiv(columns, COLUMNS_A_PROGRAM),),
        partial,
        into,
        parts,
        columns,
        NATIVE=is_native(_sum_parts, partial.device),
        STEP=PARTS_A_STEP,
        BLOCK=COLUMNS_A_PROGRAM,
        num_warps=4,
    )
    return into
