"""Activations on GPUs: a program for a tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quaver.kernels.activation import reference
from quaver.kernels.activation.names import (
    DEFAULT_ALPHA,
    DEFAULT_LIMIT,
    activated_shape,
    nonlinearity_of,
)
from quaver.kernels.activation.triton_formulas import linear_part
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
from quaver.kernels.common.triton_numbers import block_amax, widened
from quaver.kernels.common.triton_tiles import Tile, tile_corner

TILE = Tile(8, 512, 4)
TRANSPOSING_TILE = Tile(64, 64, 4)


@triton.jit
def load_wide(x, row, column, row_stride, column_stride, mask):
    """A tile in float32, zeros outside the mask."""
    at = row[:, None] * row_stride + column[None, :] * column_stride
    return widened(tl.load(x + at, mask=mask, other=0.0))


@triton.jit(do_not_specialize=["slot", "phase"])
def _forward(
    x, y, transposed, result, scale, amax, ready, own, scale_inv,
    rows, columns, row_stride, column_stride, bound, alpha, slot, limit, phase,
    KIND: tl.constexpr, GATED: tl.constexpr, CAST: tl.constexpr, E5M2: tl.constexpr,
    NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of y [rows, columns]; `bound` is the activation's limit, `limit` the format's."""
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
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = load_wide(x, row, column, row_stride, column_stride, mask)
    value = value_of(value, bound, alpha, KIND)
    if GATED:
        linear = load_wide(x, row, column + columns, row_stride, column_stride, mask)
        value = value * linear_part(linear, bound, KIND)
    store_result(
        value, used, y, transposed, result, row, column, rows, columns, mask, phase,
        CAST, E5M2, NATIVE,
    )  # fmt: skip
    if CAST:
        note_amax(block_amax(tl.where(mask, value, 0.0), None), amax, own, slot, phase)


def tile_meta(tile: Tile) -> dict[str, int]:
    """The constants of a tile."""
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    name: str,
    numbers: tuple[float, float],
    cast: Casting | None,
) -> None:
    """Launch the forward, which writes to y, or to the cast's target."""
    rows, columns = y.shape
    kind, gated = nonlinearity_of(name)
    tile = TILE if cast is None or cast.target.transposed is None else TRANSPOSING_TILE
    target: tuple[Any, ...] = (y, *NO_TARGET) if cast is None else cast.target
    slot, limit = (0, 1.0) if cast is None else cast.numbers
    bound, alpha = numbers
    counts = (rows, columns, *x.stride(), float(bound), float(alpha), slot, limit)
    meta = {
        "KIND": kind,
        "GATED": gated,
        **(no_cast(_forward, x.device) if cast is None else cast.meta),
        **tile_meta(tile),
    }
    grid = (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)
    launch_phases(_forward, grid, (x, *target), counts, phases_of(cast), meta)


def activation(
    x: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    limit: float = DEFAULT_LIMIT,
    alpha: float = DEFAULT_ALPHA,
) -> torch.Tensor:
    """See `reference.activation`."""
    y = torch.empty(activated_shape(x, name), dtype=dtype, device=x.device)
    if y.numel():
        _launch(x, y, name, (limit, alpha), None)
    return y


def activation_cast(
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
) -> reference.Cast:
    """See `reference.activation_cast`; what is cast is also written to `result`, float32 [M, H]."""
    shape = activated_shape(x, name)
    rest = (scale, amax, ready, slot, dtype, columnwise, margin)
    if 0 in shape:
        return reference.activation_cast(x, name, limit, alpha, *rest)
    cast = casting(_forward, shape, *rest, result)
    _launch(x, cast.target.data, name, (limit, alpha), cast)
    return cast.payload, cast.transposed, cast.target.scale_inv
