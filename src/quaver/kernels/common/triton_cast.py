"""Casting a matrix to FP8 with one scale: the kernel of `cast` and its relatives.

It reads x once. A scale that x's own amax gives takes a launch before: that leaves one partial
amax a program, so that nothing has to be set to zero, and each program here takes their maximum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import Prepared, cdiv, launch_grid
from quaver.kernels.common.triton_numbers import (
    block_amax,
    current_scale,
    fp8_bytes,
    raise_cell,
    reciprocal,
    scale_from_amax,
)
from quaver.kernels.common.triton_tiles import (
    PARTS,
    Tile,
    joined_amax,
    load_tile,
    store_tile,
    tile_corner,
)

ROWWISE_TILE = Tile(16, 512, 4)
BOTH_TILE = Tile(128, 128, 8)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The payload, the transposed payload (empty if not asked for) and scale_inv."""


@triton.jit
def _scale(
    scale, ready, parts, slot, count, limit, epsilon, POWER_2: tl.constexpr, PARTS: tl.constexpr
):
    """The scale: given; given if it is ready, else of the own amax; of the own amax."""
    if parts is None:
        used = tl.load(scale + slot)
    elif scale is None:
        used = current_scale(joined_amax(parts, count, PARTS), limit, epsilon, POWER_2)
    else:
        own = scale_from_amax(joined_amax(parts, count, PARTS), limit)
        used = tl.where(tl.load(ready + slot) > 0.0, tl.load(scale + slot), own)
    return used


@triton.jit(do_not_specialize=["slot", "count"])
def _cast(
    x,
    data,
    transposed,
    scale_inv,
    scale,
    amax,
    ready,
    parts,
    sums,
    slot,
    count,
    limit,
    epsilon,
    rows,
    columns,
    row_stride,
    column_stride,
    POWER_2: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    if parts is not None:  # backwards: the end of x, which was read last, is still in the L2 cache
        tile = tl.num_programs(0) - 1 - tile
    corner = tile_corner(tile, columns, ROWS, COLUMNS)
    used = _scale(scale, ready, parts, slot, count, limit, epsilon, POWER_2, PARTS)
    value = load_tile(x, corner, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    coded = fp8_bytes(value * used, E5M2, NATIVE)
    store_tile(coded, data, transposed, corner, rows, columns, ROWS, COLUMNS)
    if amax is not None:
        raise_cell(amax + slot, block_amax(value, None))
    if sums is not None:
        column = corner[1] + tl.arange(0, COLUMNS)
        there = sums + corner[0] // ROWS * columns + column
        tl.store(there, tl.sum(value, 0), mask=column < columns)
    if tile == 0:
        tl.store(scale_inv, reciprocal(used))


class _Launch(NamedTuple):
    """What launches of one signature share."""

    prepared: Prepared
    grid: tuple[int, ...]
    sizes: tuple[int, ...]


_launches: dict[tuple[Any, ...], _Launch] = {}
KEPT_LAUNCHES = 4096


class Scaling(NamedTuple):
    """Where a cast's scale comes from, in the order of the kernel's arguments.

    Attributes:
        scale, amax, ready, slot: as in `cast`; without `scale`, `parts` alone gives it.
        parts: partial amaxes of x, float32 [n]; None: the scale is set.
        limit: what x's own amax is scaled to.
        epsilon, power_2: as in `current_cast`, where there is no `scale`.
    """

    scale: torch.Tensor | None
    amax: torch.Tensor | None
    ready: torch.Tensor | None
    parts: torch.Tensor | None
    slot: int
    limit: float
    epsilon: float = 0.0
    power_2: bool = False


def cast_matrix(
    x: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    columnwise: bool,
    scaling: Scaling,
    sums: torch.Tensor | None = None,
) -> Results:
    """Cast x [M, K], any strides, to `dtype`.

    Args:
        shape: of the payload: [..., K].
        columnwise: also make the transposed payload.
        sums: float32 [ceil(M / BOTH_TILE.rows), K], for the column sums of each row of tiles.
    """
    scale, amax, ready, parts, slot, limit, epsilon, power_2 = scaling
    device = x.device
    rows, columns = x.shape
    data = torch.empty(shape, dtype=dtype, device=device)
    transposed = torch.empty((columns, rows) if columnwise else (0,), dtype=dtype, device=device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=device)
    tensors = (
        x,
        data,
        transposed if columnwise else None,
        scale_inv,
        scale,
        amax,
        ready,
        parts,
        sums,
    )
    numbers = (slot, 0 if parts is None else parts.shape[0], limit, epsilon)
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    unaligned = [a for a in addresses if a is not None and a & 15]
    present = tuple([a is None for a in addresses])
    key = (device, x.dtype, dtype, x.shape, x.stride(), present, power_2)
    known = _launches.get(key)
    if known is not None and not unaligned:
        known.prepared(known.grid, (*addresses, *numbers, *known.sizes))
    else:
        launched = _first_launch(x, tensors[1:], numbers, dtype, power_2)
        if launched is not None and not unaligned:
            if len(_launches) >= KEPT_LAUNCHES:  # of ever new shapes
                _launches.clear()
            _launches[key] = launched
    return data, transposed, scale_inv


def _first_launch(
    x: torch.Tensor,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int, int, float, float],
    dtype: torch.dtype,
    power_2: bool,
) -> _Launch | None:
    """Launch by the general way; what the next launch needs of it, outside of the interpreter."""
    data, transposed, *others = tensors
    rows, columns = x.shape
    both = transposed is not None or others[-1] is not None
    tile = BOTH_TILE if both else ROWWISE_TILE
    native = is_native(_cast, x.device)
    payloads = [data, transposed]
    if not native:  # without E4M3 there is no pointer to it either
        payloads = [None if t is None else t.view(torch.uint8) for t in payloads]
    grid = (max(cdiv(rows, tile.rows) * cdiv(columns, tile.columns), 1), 1, 1)
    sizes = (rows, columns, *x.stride())
    prepared = launch_grid(
        _cast,
        grid,
        x,
        *payloads,
        *others,
        *numbers,
        *sizes,
        POWER_2=power_2,
        E5M2=dtype == torch.float8_e5m2,
        NATIVE=native,
        PARTS=PARTS,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return None if prepared is None else _Launch(prepared, grid, sizes)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K], M the product of the leading dimensions; a view where there is one."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
