"""The gradients of activations on GPUs: a program for a tile.

Their sums over rows, a bias's gradient, take two stages: each tile sums its rows, and the sums of
the tiles are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quaver.kernels.activation import reference
from quaver.kernels.activation.names import (
    DEFAULT_ALPHA,
    DEFAULT_LIMIT,
    check_gradient,
    nonlinearity_of,
)
from quaver.kernels.activation.triton import load_wide, tile_meta
from quaver.kernels.activation.triton_formulas import linear_part, linear_slope, slope
from quaver.kernels.activation.triton_formulas import value as value_of
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
from quaver.kernels.common.triton_launch import cdiv
from quaver.kernels.common.triton_numbers import block_amax, narrowed, widened
from quaver.kernels.common.triton_sums import sum_parts
from quaver.kernels.common.triton_tiles import Tile, tile_corner

TILE = Tile(8, 512, 4)
CAST_TILE = Tile(64, 64, 4)


@triton.jit
def _emit(
    value, used, dx, transposed, result, parts, tile_row, row, column, rows, width, mask, phase,
    CAST: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a tile of dx [rows, width] and its sums; its amax."""
    store_result(
        value, used, dx, transposed, result, row, column, rows, width, mask, phase,
        CAST, E5M2, NATIVE,
    )  # fmt: skip
    if CAST:
        value = tl.where(mask, value, 0.0)
        # `any` along the rows: a column is inside if one of its values is.
        inside = tl.max(mask.to(tl.int32), 0) > 0
        tl.store(parts + tile_row * width + column, tl.sum(value, 0), mask=inside)
        return block_amax(value, None)
    else:
        return 0.0


@triton.jit(do_not_specialize=["slot", "phase"])
def _backward(
    grad, x, parts, dx, transposed, result, scale, amax, ready, own, scale_inv,
    rows, columns, grad_row_stride, grad_column_stride, row_stride, column_stride,
    bound, alpha, slot, limit, phase,
    KIND: tl.constexpr, GATED: tl.constexpr, CAST: tl.constexpr, E5M2: tl.constexpr,
    NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tiles of dx that come of one tile of grad [rows, columns]."""
    used = 1.0
    if CAST:
        if ready is not None:
            if (phase == 0) & (tl.load(ready + slot) > 0.0):
                return  # the scale was set: no amax is needed before the cast
        used = used_scale(scale, ready, own, slot, limit)
        store_scale_inv(scale_inv, used)
    corner = tile_corner(tl.program_id(0), columns, ROWS, COLUMNS)
    row = corner[0] + tl.arange(0, ROWS)
    column = corner[1] + tl.arange(0, COLUMNS)
    tile_row = corner[0] // ROWS
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    g = load_wide(grad, row, column, grad_row_stride, grad_column_stride, mask)
    gate = load_wide(x, row, column, row_stride, column_stride, mask)
    change = slope(gate, bound, alpha, KIND)
    width = columns
    if GATED:
        width = 2 * columns
        linear = load_wide(x, row, column + columns, row_stride, column_stride, mask)
        change = change * linear_part(linear, bound, KIND)
    value = g * change
    if GATED and CAST:
        value = widened(narrowed(value, x.dtype.element_ty, NATIVE))
    seen = _emit(
        value, used, dx, transposed, result, parts, tile_row, row, column, rows, width, mask,
        phase, CAST, E5M2, NATIVE,
    )  # fmt: skip
    if GATED:
        change = value_of(gate, bound, alpha, KIND) * linear_slope(linear, bound, KIND)
        value = g * change
        if CAST:
            value = widened(narrowed(value, x.dtype.element_ty, NATIVE))
        other = _emit(
            value, used, dx, transposed, result, parts, tile_row, row, column + columns, rows,
            width, mask, phase, CAST, E5M2, NATIVE,
        )  # fmt: skip
        seen = tl.maximum(seen, other)
    if CAST:
        note_amax(seen, amax, own, slot, phase)


def _launch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    dx: torch.Tensor,
    name: str,
    numbers: tuple[float, float],
    cast: Casting | None,
) -> None:
    """Launch on (grad, x, partial sums), to write dx, or the cast's target."""
    grad, x, parts = tensors
    rows, columns = grad.shape
    kind, gated = nonlinearity_of(name)
    tile = TILE if cast is None else CAST_TILE
    target: tuple[Any, ...] = (dx, *NO_TARGET) if cast is None else cast.target
    slot, limit = (0, 1.0) if cast is None else cast.numbers
    strides = (*grad.stride(), *x.stride())
    bound, alpha = numbers
    counts = (rows, columns, *strides, float(bound), float(alpha), slot, limit)
    meta = {
        "KIND": kind,
        "GATED": gated,
        **(no_cast(_backward, x.device) if cast is None else cast.meta),
        **tile_meta(tile),
    }
    grid = (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)
    launch_phases(_backward, grid, (grad, x, parts, *target), counts, phases_of(cast), meta)


def activation_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    name: str,
    limit: float = DEFAULT_LIMIT,
    alpha: float = DEFAULT_ALPHA,
) -> torch.Tensor:
    """See `reference.activation_backward`."""
    check_gradient(grad, x, name)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        _launch((grad, x, None), dx, name, (limit, alpha), None)
    return dx


def activation_backward_cast(
    grad: torch.Tensor,
    x: torch.Tensor,
    name: str,
    limit: float,
    alpha: float,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
    *,
    result: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference; what is cast is also written to `result`, float32 [M, W]."""
    check_gradient(grad, x, name)
    rest = (scale, amax, ready, slot, dtype, columnwise, margin)
    if x.numel() == 0:
        return reference.activation_backward_cast(grad, x, name, limit, alpha, *rest)
    cast = casting(_backward, x.shape, *rest, result)
    parts = torch.empty(
        (cdiv(x.shape[0], CAST_TILE.rows), x.shape[1]), dtype=torch.float32, device=x.device
    )
    _launch((grad, x, parts), cast.target.data, name, (limit, alpha), cast)
    sums = sum_parts(parts, torch.float32)
    return cast.payload, cast.transposed, cast.target.scale_inv, sums
