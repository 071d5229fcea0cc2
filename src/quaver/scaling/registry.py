"""The order in which states were first used, by key: the layout of a reduction's buffer.

It matters to reductions only. A slot is never given up, so that the buffer's size is the same on
every rank, whenever garbage is collected.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from quaver.recipe import Recipe
from quaver.scaling.delayed import DelayedScalingState


class Key(NamedTuple):
    """States that are finalized together: same recipe (by value), process group and direction."""

    recipe: Recipe
    group: Any
    mode: str


def key_of(state: DelayedScalingState) -> Key:
    """The key under which `state` is finalized."""
    return Key(state.recipe, state.group, state.mode)


class Slot(NamedTuple):
    """A state's place in the buffer; `state()` is None once it is dead."""

    state: weakref.ref[DelayedScalingState]
    size: int


_slots: dict[Key, list[Slot]] = {}
_lock = threading.Lock()


def register(state: DelayedScalingState) -> None:
    """Give `state` the next slot of its key, unless it has one there."""
    key = key_of(state)
    with _lock:
        if key not in state.registered:
            state.registered.add(key)
            _slots.setdefault(key, []).append(Slot(weakref.ref(state), state.num_quantizers))


def slots(key: Key) -> list[Slot]:
    """The slots of `key`, in registration order."""
    with _lock:
        return list(_slots.get(key, ()))
