"""Tiles of a matrix in Triton kernels, and the amax of one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import magnitude, raise_cell, widened

PARTS = 1024
"""The most partial amaxes: about as many programs as a large GPU runs at a time."""


class Tile(NamedTuple):
    """The rows and columns that a program takes at a time, and its warps."""

    rows: int
    columns: int
    warps: int


AMAX_TILE = Tile(8, 1024, 8)
AMAX_FLAT_TILE = Tile(1, 8192, 8)


@triton.jit
def tile_corner(tile, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column, int64, of the first value of a tile, counted along the rows."""
    across = tl.maximum(tl.cdiv(columns, COLUMNS), 1)
    return (tile // across).to(tl.int64) * ROWS, (tile % across).to(tl.int64) * COLUMNS


@triton.jit
def load_tile(
    x,
    corner,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The tile of x at `corner` in float32, zeros beyond the edges."""
    row = corner[0] + tl.arange(0, ROWS)
    column = corner[1] + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    where = row[:, None] * row_stride + column[None, :] * column_stride
    return widened(tl.load(x + where, mask=mask, other=0.0))


@triton.jit
def store_tile(
    coded,
    data,
    transposed,
    corner,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a tile of bytes in data [rows, columns] and, unless None, in its transpose."""
    row = corner[0] + tl.arange(0, ROWS)
    column = corner[1] + tl.arange(0, COLUMNS)
    byte: tl.constexpr = tl.pointer_type(tl.uint8)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    where = row[:, None] * columns + column[None, :]
    tl.store(data.to(byte, bitcast=True) + where, coded, mask=mask)
    if transposed is not None:
        mask = (column < columns)[:, None] & (row < rows)[None, :]
        where = column[:, None] * rows + row[None, :]
        tl.store(transposed.to(byte, bitcast=True) + where, tl.trans(coded), mask=mask)


@triton.jit
def joined_amax(parts, count, PARTS: tl.constexpr):
    """The maximum of `count` partial amaxes; the first if that is NaN, as a given one may be."""
    part = tl.arange(0, PARTS)
    largest = tl.max(tl.load(parts + part, mask=part < count, other=0.0), 0)
    first = tl.load(parts)
    return tl.where(first >= 0.0, largest, first)


@triton.jit(do_not_specialize=["slot"])
def _amax(
    x,
    parts,
    cell,
    ready,
    slot,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """max|x| over a program's tiles, into parts[program] or the cell at `slot`.

    Nothing is done where the slot is ready.
    """
    if ready is not None:
        if tl.load(ready + slot) > 0.0:
            return
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        corner = tile_corner(tile, columns, ROWS, COLUMNS)
        value = load_tile(x, corner, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
        largest = tl.maximum(largest, magnitude(value))
    if parts is not None:
        tl.store(parts + tl.program_id(0), tl.max(largest, None))
    else:
        raise_cell(cell + slot, tl.max(largest, None))


def partial_amax(x: torch.Tensor, ready: torch.Tensor | None, slot: int) -> torch.Tensor:
    """Partial amaxes, float32 [programs], of x [M, K] with any strides.

    Where the flat element `slot` of `ready` is positive, they are not computed.
    """
    programs, sizes, tile = _spread(x)
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    _launch(x, parts, None, ready, slot, programs, sizes, tile)
    return parts


def raise_amax(x: torch.Tensor, into: torch.Tensor, slot: int) -> None:
    """Raise the flat element `slot` of `into`, float32, to max|x| of x [M, K] with any strides."""
    programs, sizes, tile = _spread(x)
    _launch(x, None, into, None, slot, programs, sizes, tile)


def _spread(x: torch.Tensor) -> tuple[int, tuple[int, int, int, int], Tile]:
    """Programs, (rows, columns and their strides) and tile to read all of x along its memory."""
    if x.is_contiguous():
        count = x.numel()
        sizes, tile = (1, count, count, 1), AMAX_FLAT_TILE
    else:
        (rows, columns), (row_stride, column_stride) = x.shape, x.stride()
        sizes, tile = (rows, columns, row_stride, column_stride), AMAX_TILE
        if row_stride < column_stride:
            sizes = (columns, rows, column_stride, row_stride)
    programs = cdiv(sizes[0], tile.rows) * cdiv(sizes[1], tile.columns)
    return min(max(programs, 1), PARTS), sizes, tile


def _launch(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    cell: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    programs: int,
    sizes: tuple[int, int, int, int],
    tile: Tile,
) -> None:
    launch_grid(
        _amax,
        (programs,),
        x,
        parts,
        cell,
        ready,
        slot,
        *sizes,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
