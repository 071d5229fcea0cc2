"""`scale_update` in Triton: one launch for all states, which finds them by a table of addresses."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from quaver.devices import DeviceCache
from quaver.kernels.common.triton_launch import Prepared, launch_grid, next_power_of_two
from quaver.kernels.common.triton_numbers import LARGEST, scale_from_amax

ROWS = 1024
"""The most history rows that a program moves at a time."""
WARPS = 4
TABLES = 64
"""How many tables a device keeps; a model needs two: of its forward and its backward states."""

FIELDS = tl.constexpr(5)
"""Of a table's row: the addresses of history, scale and ready, slots, slots of earlier states."""


@triton.jit
def _finite(values):
    """The values that are positive and finite, 0 for others."""
    return tl.where((values > 0.0) & (values <= LARGEST), values, 0.0)


@triton.jit
def _scale_update(table, amaxes, limit, length, MOST_RECENT: tl.constexpr, ROWS: tl.constexpr):
    """A program for each slot of each state: [states, the most slots of one]."""
    entry = table + tl.program_id(0) * FIELDS
    slot = tl.program_id(1)
    slots = tl.load(entry + 3)
    if slot < slots:
        number: tl.constexpr = tl.pointer_type(tl.float32)
        history = tl.load(entry).to(number) + slot
        last = tl.load(history)
        if amaxes is not None:
            reduced = tl.load(amaxes + tl.load(entry + 4) + slot)
            last = tl.where(reduced != 0.0, reduced, last)
        if last != 0.0:
            chosen = _finite(last)
            seen = _roll(history, last, length, slots, ROWS)
            if not MOST_RECENT:
                chosen = tl.maximum(chosen, seen)
            if chosen > 0.0:
                tl.store(tl.load(entry + 1).to(number) + slot, scale_from_amax(chosen, limit))
                tl.store(tl.load(entry + 2).to(number) + slot, 1.0)


@triton.jit
def _roll(history, last, length, slots, ROWS: tl.constexpr):
    """Move each row of one slot's history up by one; return the largest finite value it had.

    A row is read by one thread and written by another: hence the barriers.
    """
    seen = _finite(tl.load(history))
    tl.debug_barrier()
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)
        there = history + row * slots
        old = tl.load(there + slots, mask=row + 1 < length, other=0.0)
        seen = tl.maximum(seen, tl.max(_finite(old), 0))
        new = tl.where(row == length - 1, last, old)
        tl.debug_barrier()
        tl.store(there, tl.where(row == 0, 0.0, new), mask=row < length)
        tl.debug_barrier()
    return seen


_launches: dict[Hashable, Prepared] = {}


def _no_tables(device: torch.device, key: Hashable) -> dict[tuple[int, ...], torch.Tensor]:
    return {}


_tables: DeviceCache[dict[tuple[int, ...], torch.Tensor]] = DeviceCache(_no_tables)


def _table(
    histories: list[torch.Tensor], scales: list[torch.Tensor], readies: list[torch.Tensor]
) -> torch.Tensor:
    """The table, int64 [states, FIELDS], on the states' device.

    It holds nothing but what it is looked up by, so that it cannot be out of date. Making one waits
    for the device, so that it may be used on any stream.
    """
    device = scales[0].device
    tables = _tables.get(device)
    addresses = [t.data_ptr() for states in (histories, scales, readies) for t in states]
    sizes = [s.shape[0] for s in scales]
    key = (*addresses, *sizes)
    table = tables.get(key)
    if table is None:
        if len(tables) >= TABLES:
            torch.get_device_module(device.type).synchronize(device)  # they may still be read
            tables.clear()
        count = len(scales)
        starts = [sum(sizes[:i]) for i in range(count)]
        columns = [addresses[i : i + count] for i in range(0, 3 * count, count)]
        rows = list(zip(*columns, sizes, starts, strict=True))
        table = tables[key] = torch.tensor(rows, dtype=torch.int64).to(device)
    return table


def scale_update(
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    readies: list[torch.Tensor],
    amaxes: torch.Tensor | None,
    limit: float,
    algorithm: str,
) -> None:
    """As the reference."""
    length = histories[0].shape[0]
    table = _table(histories, scales, readies)
    grid = (len(scales), max([s.shape[0] for s in scales]), 1)
    address = None if amaxes is None else amaxes.data_ptr()
    key = (table.device, length, algorithm, address is None or address & 15)
    prepared = _launches.get(key)
    if prepared is not None:
        prepared(grid, (table.data_ptr(), address, limit, length))
        return
    prepared = launch_grid(
        _scale_update,
        grid,
        table,
        amaxes,
        limit,
        length,
        MOST_RECENT=algorithm == "most_recent",
        ROWS=min(next_power_of_two(length), ROWS),
        num_warps=WARPS,
    )
    if prepared is not None:
        _launches[key] = prepared
