"""Casting to FP8 inside the kernel that computes what is cast.

Such a kernel runs in one phase, 1, when the scale is known to be set. Else it runs in two, as the
same code so that both compute the same values: phase 0 finds their amax if the scale was never
set, and ends at once if it was; phase 1 casts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quaver.devices import capability
from quaver.formats import MAX
from quaver.kernels.common.triton_launch import Prepared, is_interpreted, launch_grid
from quaver.kernels.common.triton_numbers import (
    fp8_bytes,
    narrowed,
    raise_cell,
    reciprocal,
    scale_from_amax,
)


class Target(NamedTuple):
    """What a fused cast reads and writes, in the order of the kernels' arguments.

    Attributes:
        data: the payload's bytes, contiguous.
        transposed: the bytes of its transpose, contiguous; None: not written by this kernel.
        result: float32, of the payload's shape: what was cast, for tests; None: not written.
        scale, amax, ready: as in `cast`.
        own: float32 [1], 0: where phase 0 leaves the amax; None without `ready`.
        scale_inv: float32 [1].
    """

    data: torch.Tensor
    transposed: torch.Tensor | None
    result: torch.Tensor | None
    scale: torch.Tensor
    amax: torch.Tensor | None
    ready: torch.Tensor | None
    own: torch.Tensor | None
    scale_inv: torch.Tensor


NO_TARGET = (None,) * (len(Target._fields) - 1)
"""What stands for a `Target` after its `data` where nothing is cast."""


class Casting(NamedTuple):
    """How a fused cast goes: its target, numbers and constants, and what is returned.

    Attributes:
        target: the tensors.
        numbers: `slot` and `limit`, the format's largest value over 2^margin.
        meta: the constants CAST, E5M2 and NATIVE.
        payload: `target.data` in its FP8 dtype.
        transposed: of the payload; empty if not asked for.
    """

    target: Target
    numbers: tuple[int, float]
    meta: dict[str, Any]
    payload: torch.Tensor
    transposed: torch.Tensor


def is_native(fn: Any, device: torch.device) -> bool:
    """Whether `fn` may leave conversions to the hardware of `device`."""
    return not is_interpreted(fn) and capability(device) >= (8, 9)


def no_cast(fn: Any, device: torch.device) -> dict[str, Any]:
    """The constants of `fn` where nothing is cast."""
    return {"CAST": False, "E5M2": False, "NATIVE": is_native(fn, device)}


def casting(
    fn: Any,
    shape: tuple[int, ...],
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int,
    result: torch.Tensor | None,
) -> Casting:
    """The tensors and arguments of a fused cast to a payload of `shape` by the kernel `fn`."""
    device = scale.device
    data = torch.empty(shape, dtype=torch.uint8, device=device)
    transposed = data.new_empty((shape[1], shape[0]) if columnwise else (0,))
    own = None if ready is None else torch.zeros(1, dtype=torch.float32, device=device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=device)
    return Casting(
        Target(
            data, transposed if columnwise else None, result, scale, amax, ready, own, scale_inv
        ),
        (slot, MAX[dtype] * 2.0**-margin),
        {"CAST": True, "E5M2": dtype == torch.float8_e5m2, "NATIVE": is_native(fn, device)},
        data.view(dtype),
        transposed.view(dtype),
    )


_launches: dict[tuple[Any, ...], Prepared] = {}
KEPT_LAUNCHES = 4096


def launch_phases(
    fn: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    phases: tuple[int, ...],
    meta: dict[str, Any],
) -> None:
    """Launch `fn` on tensors, then numbers, then the phase; once for each of `phases`.

    What was compiled is found again by the dtypes and the numbers, which is quicker than the key
    that `launch_grid` makes.
    """
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    aligned = not [a for a in addresses if a is not None and a & 15]
    dtypes = [None if t is None else t.dtype for t in tensors]
    key = (id(fn), numbers, *dtypes, None if tensors[0] is None else tensors[0].device)
    key += tuple(meta.values())
    known = _launches.get(key) if aligned else None
    for phase in phases:
        if known is not None:
            known((*grid, 1, 1), (*addresses, *numbers, phase))
            continue
        prepared = launch_grid(fn, grid, *tensors, *numbers, phase, **meta)
        if prepared is not None and aligned:
            if len(_launches) >= KEPT_LAUNCHES:  # of ever new shapes
                _launches.clear()
            _launches[key] = known = prepared


def phases_of(cast: Casting | None) -> tuple[int, ...]:
    """The phases in which a kernel runs that casts, or nothing."""
    return (1,) if cast is None or cast.target.ready is None else (0, 1)


@triton.jit
def used_scale(scale, ready, own, slot, limit):
    """The scale at `slot`; that of the tensor's own amax where it was never set."""
    used = tl.load(scale + slot)
    if ready is not None:
        used = tl.where(tl.load(ready + slot) > 0.0, used, scale_from_amax(tl.load(own), limit))
    return used


@triton.jit
def store_scale_inv(scale_inv, used):
    """What the first program leaves: 1 / scale; phase 0's is written over by phase 1's."""
    if tl.program_id(0) == 0:
        tl.store(scale_inv, reciprocal(used))


@triton.jit
def note_amax(seen, amax, own, slot, phase):
    """Raise the cell of the phase to the scalar `seen`."""
    if own is not None:  # tested apart from the phase, as what is None is known when compiling
        if phase == 0:
            raise_cell(own, seen)
    if amax is not None:
        if phase == 1:
            raise_cell(amax + slot, seen)


@triton.jit
def store_result(
    value, used, y, transposed, result, row, column, rows, columns, mask, phase,
    CAST: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a tile of y [rows, columns] at the rows and columns in `row` and `column`.

    CAST: the bytes of value * used, those of the transpose and `value` itself, where wanted. Else
    the value, rounded to y's dtype.
    """
    offsets = row[:, None] * columns + column[None, :]
    if CAST:
        if phase == 1:
            coded = fp8_bytes(value * used, E5M2, NATIVE)
            tl.store(y + offsets, coded, mask=mask)
            if transposed is not None:
                back = column[:, None] * rows + row[None, :]
                tl.store(transposed + back, tl.trans(coded), mask=tl.trans(mask))
            if result is not None:
                tl.store(result + offsets, value, mask=mask)
    else:
        tl.store(y + offsets, narrowed(value, y.dtype.element_ty, NATIVE), mask=mask)
