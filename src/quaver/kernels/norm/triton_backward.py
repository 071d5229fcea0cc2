"""The gradients of layer norm and RMS norm on GPUs.

Those of the weight and the bias are sums over rows, in two stages: each program sums its rows, and
the sums of the programs are added in a fixed order. How many programs there are depends on the
shape alone, so that every GPU gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import cdiv, launch_grid, next_power_of_two
from quaver.kernels.common.triton_numbers import narrowed, widened
from quaver.kernels.common.triton_sums import sum_parts
from quaver.kernels.norm import reference
from quaver.kernels.norm.triton import load_gain

LONGEST = 16384
VALUES_A_PROGRAM = 2048
VALUES_A_WARP = 1024
MOST_WARPS = 16
PROGRAMS = 264
"""Twice a large GPU's processors: enough to fill it, and few enough partial sums."""

PIECE_ROWS, PIECE_COLUMNS = 16, 128
"""What a program of `_parts` reads at a time."""


@triton.jit
def _normalized(x, middle, inverse, at, mask):
    """(x - mean) * rstd at the offsets `at`, 0 outside the mask; with no mean for RMS norm."""
    value = widened(tl.load(x + at, mask=mask, other=0.0))
    return tl.where(mask, (value - middle[:, None]) * inverse[:, None], 0.0)


@triton.jit
def _statistics(mean, rstd, row, within):
    """Mean, 0 if there is none, and reciprocal root of some rows."""
    inverse = tl.load(rstd + row, mask=within, other=0.0)
    if mean is None:
        middle = tl.zeros(inverse.shape, tl.float32)
    else:
        middle = tl.load(mean + row, mask=within, other=0.0)
    return middle, inverse


@triton.jit
def _offsets(row, column, row_stride, column_stride):
    return row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride


@triton.jit(do_not_specialize=["rows", "chunk"])
def _whole_rows(
    grad, x, weight, mean, rstd, dx, dweight, dbias, rows, columns, chunk,
    grad_row_stride, grad_column_stride, row_stride, column_stride,
    CENTERED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of `chunk` rows, and their sums for dweight and dbias [programs, K], where wanted."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gain = load_gain(weight, column, inside, CENTERED)
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    biases = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunk, ROWS):
        row = part * chunk + start + tl.arange(0, ROWS)
        within = row < rows
        mask = within[:, None] & inside[None, :]
        middle, inverse = _statistics(mean, rstd, row, within)
        at = _offsets(row, column, row_stride, column_stride)
        n = _normalized(x, middle, inverse, at, mask)
        at = _offsets(row, column, grad_row_stride, grad_column_stride)
        g = widened(tl.load(grad + at, mask=mask, other=0.0))
        if dweight is not None:
            weights += g * n
        if dbias is not None:
            biases += g
        g *= gain[None, :]
        change = g - n * (tl.sum(g * n, 1) / columns)[:, None]
        if mean is not None:
            change -= (tl.sum(g, 1) / columns)[:, None]
        change = narrowed(change * inverse[:, None], dx.dtype.element_ty, NATIVE)
        tl.store(dx + row[:, None] * columns + column[None, :], change, mask=mask)
    if dweight is not None:
        tl.store(dweight + part * columns + column, tl.sum(weights, 0), mask=inside)
    if dbias is not None:
        tl.store(dbias + part * columns + column, tl.sum(biases, 0), mask=inside)


@triton.jit
def _long_row(
    grad, x, weight, mean, rstd, dx, columns,
    grad_row_stride, grad_column_stride, row_stride, column_stride,
    CENTERED: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of one row, in pieces of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    within = row >= 0
    middle, inverse = _statistics(mean, rstd, row, within)
    along = tl.zeros([1], tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        mask = within[:, None] & inside[None, :]
        at = _offsets(row, column, row_stride, column_stride)
        n = _normalized(x, middle, inverse, at, mask)
        at = _offsets(row, column, grad_row_stride, grad_column_stride)
        g = widened(tl.load(grad + at, mask=mask, other=0.0))
        g *= load_gain(weight, column, inside, CENTERED)[None, :]
        along += tl.sum(g * n, 1)
        total += tl.sum(g, 1)
    along = along / columns
    total = total / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        mask = within[:, None] & inside[None, :]
        at = _offsets(row, column, row_stride, column_stride)
        n = _normalized(x, middle, inverse, at, mask)
        at = _offsets(row, column, grad_row_stride, grad_column_stride)
        g = widened(tl.load(grad + at, mask=mask, other=0.0))
        g *= load_gain(weight, column, inside, CENTERED)[None, :]
        change = g - n * along[:, None]
        if mean is not None:
            change -= total[:, None]
        change = narrowed(change * inverse[:, None], dx.dtype.element_ty, NATIVE)
        tl.store(dx + row[:, None] * columns + column[None, :], change, mask=mask)


@triton.jit(do_not_specialize=["rows", "chunk"])
def _parts(
    grad, x, mean, rstd, dweight, dbias, rows, columns, chunk,
    grad_row_stride, grad_column_stride, row_stride, column_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of `chunk` rows in BLOCK columns for dweight and dbias [chunks, K]."""
    across = tl.cdiv(columns, BLOCK)
    part = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    biases = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunk, ROWS):
        row = part * chunk + start + tl.arange(0, ROWS)
        within = row < rows
        mask = within[:, None] & inside[None, :]
        middle, inverse = _statistics(mean, rstd, row, within)
        at = _offsets(row, column, row_stride, column_stride)
        n = _normalized(x, middle, inverse, at, mask)
        at = _offsets(row, column, grad_row_stride, grad_column_stride)
        g = widened(tl.load(grad + at, mask=mask, other=0.0))
        weights += g * n
        biases += g
    tl.store(dweight + part * columns + column, tl.sum(weights, 0), mask=inside)
    if dbias is not None:
        tl.store(dbias + part * columns + column, tl.sum(biases, 0), mask=inside)


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    rms: bool,
) -> reference.Norm:
    """See `reference.norm_backward`."""
    reference.check_backward(grad, x, weight, rms)
    if x.numel() == 0:
        return reference.norm_backward(grad, x, weight, mean, rstd, zero_centered, rms)
    rows, columns = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    middle = None if rms else mean
    gain = None if weight is None else weight.contiguous()
    long = columns > LONGEST
    rows_at_once = PIECE_ROWS if long else max(VALUES_A_PROGRAM // next_power_of_two(columns), 1)
    chunk = cdiv(cdiv(rows, rows_at_once), PROGRAMS) * rows_at_once
    dweight, dbias = _parts_of(x, cdiv(rows, chunk), weight is not None, rms)
    strides = (*grad.stride(), *x.stride())
    sums = (dweight, dbias, rows, columns, chunk, *strides)
    if not long:
        block = next_power_of_two(columns)
        warps = min(max(rows_at_once * block // VALUES_A_WARP, 1), MOST_WARPS)
        launch_grid(
            _whole_rows,
            (cdiv(rows, chunk),),
            *(grad, x, gain, middle, rstd, dx, *sums),
            CENTERED=zero_centered,
            NATIVE=is_native(_whole_rows, x.device),
            ROWS=rows_at_once,
            BLOCK=block,
            num_warps=warps,
        )
    else:
        launch_grid(
            _long_row,
            (rows,),
            *(grad, x, gain, middle, rstd, dx, columns, *strides),
            CENTERED=zero_centered,
            NATIVE=is_native(_long_row, x.device),
            BLOCK=LONGEST,
            num_warps=MOST_WARPS,
        )
        if dweight is not None:
            launch_grid(
                _parts,
                (cdiv(rows, chunk) * cdiv(columns, PIECE_COLUMNS),),
                *(grad, x, middle, rstd, *sums),
                ROWS=PIECE_ROWS,
                BLOCK=PIECE_COLUMNS,
                num_warps=4,
            )
    if weight is None or dweight is None:
        return dx, rstd.new_empty(0), rstd.new_empty(0)
    total = rstd.new_empty(0) if dbias is None else sum_parts(dbias, weight.dtype)
    return dx, sum_parts(dweight, weight.dtype), total


def _parts_of(
    x: torch.Tensor, parts: int, affine: bool, rms: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Room for the partial sums of dweight and dbias; None where they are not wanted."""

    def room(wanted: bool) -> torch.Tensor | None:
        shape = (parts, x.shape[1])
        return torch.empty(shape, dtype=torch.float32, device=x.device) if wanted else None

    return room(affine), room(affine and not rms)
