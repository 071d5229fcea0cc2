"""Layer norm and RMS norm on GPUs: a program for a row, or for several short ones.

A row of up to `LONGEST` columns is read once and kept; a longer one is read for each of its sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_fused import (
    NO_TARGET,
    Casting,
    casting,
    launch_phases,
    no_cast,
    note_amax,
    phases_of,
    store_result,
    store_scale_inv,
    used_scale,
)
from quaver.kernels.common.triton_launch import cdiv, next_power_of_two
from quaver.kernels.common.triton_numbers import block_amax, widened
from quaver.kernels.common.triton_transpose import transpose_bytes
from quaver.kernels.norm import reference

LONGEST = 16384
VALUES_A_PROGRAM = 4096
"""Short rows are put together up to this many values."""

VALUES_A_WARP = 1024
MOST_WARPS = 16


@triton.jit
def load_gain(weight, column, inside, CENTERED: tl.constexpr):
    """What multiplies the normalized values: weight, or 1 + weight, or 1."""
    gain = tl.full(column.shape, 1.0, tl.float32)
    if weight is not None:
        gain = widened(tl.load(weight + column, mask=inside, other=0.0))
        if CENTERED:
            gain += 1.0
    return gain


@triton.jit
def _finished(value, gain, bias, column, inside):
    """The normalized values times the gain plus the bias; 0 beyond the last column."""
    y = value * gain[None, :]
    if bias is not None:
        y += widened(tl.load(bias + column, mask=inside, other=0.0))[None, :]
    return y


@triton.jit
def _reciprocal_root(mean_square, eps):
    root = tl.sqrt_rn(mean_square + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def _long_statistics(
    x, start_of_row, column_stride, columns, eps, RMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean and reciprocal root of one row in pieces of BLOCK columns; both of shape [1]."""
    middle = tl.zeros([1], tl.float32)
    if not RMS:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = start_of_row[:, None] + column[None, :].to(tl.int64) * column_stride
            value = tl.load(x + at, mask=(column < columns)[None, :], other=0.0)
            middle += tl.sum(widened(value), 1)
        middle = middle / columns
    square = tl.zeros([1], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < columns)[None, :]
        at = start_of_row[:, None] + column[None, :].to(tl.int64) * column_stride
        value = widened(tl.load(x + at, mask=inside, other=0.0))
        value = tl.where(inside, value - middle[:, None], 0.0)
        square += tl.sum(value * value, 1)
    return middle, _reciprocal_root(square / columns, eps)


@triton.jit
def _store(
    value, used, y, result, row, column, rows, columns, mask, phase,
    CAST: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store the values, cast or rounded; their amax."""
    store_result(
        value, used, y, None, result, row, column, rows, columns, mask, phase, CAST, E5M2, NATIVE
    )
    if CAST:
        return block_amax(tl.where(mask, value, 0.0), None)
    else:
        return 0.0


@triton.jit(do_not_specialize=["rows", "slot", "phase"])
def _forward(
    x, weight, bias, mean, rstd, y, transposed, result, scale, amax, ready, own, scale_inv,
    rows, columns, row_stride, column_stride, eps, slot, limit, phase,
    RMS: tl.constexpr, CENTERED: tl.constexpr, CAST: tl.constexpr, E5M2: tl.constexpr,
    NATIVE: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    used = 1.0
    if CAST:
        if ready is not None:
            if (phase == 0) & (tl.load(ready + slot) > 0.0):
                return  # the scale was set: no amax is needed before the cast
        used = used_scale(scale, ready, own, slot, limit)
        store_scale_inv(scale_inv, used)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = row < rows
    start_of_row = row * row_stride
    seen = 0.0
    if WHOLE:
        column = tl.arange(0, BLOCK)
        inside = column < columns
        mask = within[:, None] & inside[None, :]
        at = start_of_row[:, None] + column[None, :].to(tl.int64) * column_stride
        value = widened(tl.load(x + at, mask=mask, other=0.0))
        middle = tl.zeros([ROWS], tl.float32)
        if not RMS:
            middle = tl.sum(value, 1) / columns
            value = tl.where(mask, value - middle[:, None], 0.0)
        inverse = _reciprocal_root(tl.sum(value * value, 1) / columns, eps)
        gain = load_gain(weight, column, inside, CENTERED)
        value = _finished(value * inverse[:, None], gain, bias, column, inside)
        seen = _store(
            value, used, y, result, row, column, rows, columns, mask, phase, CAST, E5M2, NATIVE
        )
    else:
        middle, inverse = _long_statistics(x, start_of_row, column_stride, columns, eps, RMS, BLOCK)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            mask = within[:, None] & inside[None, :]
            at = start_of_row[:, None] + column[None, :].to(tl.int64) * column_stride
            value = widened(tl.load(x + at, mask=mask, other=0.0))
            gain = load_gain(weight, column, inside, CENTERED)
            value = (value - middle[:, None]) * inverse[:, None]
            value = _finished(value, gain, bias, column, inside)
            piece = _store(
                value, used, y, result, row, column, rows, columns, mask, phase, CAST, E5M2, NATIVE
            )
            seen = tl.maximum(seen, piece)
    if not RMS:
        tl.store(mean + row, middle, mask=within)
    tl.store(rstd + row, inverse, mask=within)
    if CAST:
        note_amax(seen, amax, own, slot, phase)


def row_shape(columns: int) -> dict[str, int]:
    """ROWS and BLOCK of a program, and num_warps."""
    block = min(next_power_of_two(columns), LONGEST)
    rows = max(VALUES_A_PROGRAM // block, 1) if columns <= LONGEST else 1
    warps = min(max(rows * block // VALUES_A_WARP, 1), MOST_WARPS)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def _launch(
    x: torch.Tensor,
    parameters: tuple[torch.Tensor | None, torch.Tensor | None],
    y: torch.Tensor,
    cast: Casting | None,
    options: tuple[float, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward, which writes to y, or to the cast's target; mean and rstd."""
    eps, zero_centered, rms = options
    rows, columns = x.shape
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(0 if rms else rows, dtype=torch.float32, device=x.device)
    weight, bias = (None if p is None else p.contiguous() for p in parameters)
    target: tuple[Any, ...] = (y, *NO_TARGET) if cast is None else cast.target
    slot, limit = (0, 1.0) if cast is None else cast.numbers
    shape = row_shape(columns)
    tensors = (x, weight, bias, mean, rstd, *target)
    numbers = (rows, columns, *x.stride(), float(eps), slot, limit)
    meta = {
        "RMS": rms,
        "CENTERED": zero_centered,
        **(no_cast(_forward, x.device) if cast is None else cast.meta),
        "WHOLE": columns <= LONGEST,
        **shape,
    }
    grid = (cdiv(rows, shape["ROWS"]),)
    launch_phases(_forward, grid, tensors, numbers, phases_of(cast), meta)
    return mean, rstd


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    dtype: torch.dtype,
) -> reference.Norm:
    """See `reference.norm`."""
    reference.check_norm(x, weight, bias, rms)
    if x.numel() == 0:
        return reference.norm(x, weight, bias, eps, zero_centered, rms, dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, *_launch(x, (weight, bias), y, None, (eps, zero_centered, rms))


def norm_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
    *,
    result: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.norm_cast`; what is cast is also written to `result`, float32 [M, K]."""
    reference.check_norm(x, weight, bias, rms)
    options = (eps, zero_centered, rms)
    if x.numel() == 0:
        return reference.norm_cast(
            x, weight, bias, *options, scale, amax, ready, slot, dtype, columnwise, margin
        )
    cast = casting(_forward, x.shape, scale, amax, ready, slot, dtype, columnwise, margin, result)
    mean, rstd = _launch(x, (weight, bias), cast.target.data, cast, options)
    if columnwise:
        transpose_bytes(cast.target.data, cast.transposed.view(torch.uint8))
    return cast.payload, cast.transposed, cast.target.scale_inv, mean, rstd
