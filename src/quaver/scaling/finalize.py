"""Finalization: scales from amaxes, device by device, reduced across processes if asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quaver.devices import group_by_device, on_device
from quaver.formats import MAX
from quaver.kernels import custom_scale_update, scale_update
from quaver.kernels.scale_update.reference import history_amax, next_scale
from quaver.recipe import Recipe
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.registry import Key, key_of, register
from quaver.scaling.registry import slots as registered_slots
from quaver.scaling.state import Scales
from quaver.scaling.used import Used


def finalize(states: list[DelayedScalingState], one_device: bool, keys: Iterable[Key] = ()) -> None:
    """Update the scales of `states`.

    Without a reduction exactly these states are updated. With one, each key is reduced in one
    collective over all states that were ever registered under it, and all of them that live are.

    Args:
        one_device: all states were used on one device.
        keys: further keys that take part in reductions, though none of their states is given:
            other ranks may have used some.
    """
    if not processes():
        for alike in _alike(states):
            _update_locally(alike, one_device)
        return
    by_key: dict[Key, list[DelayedScalingState]] = {}
    for state in states:
        by_key.setdefault(key_of(state), []).append(state)
    for key, members in by_key.items():
        if not reduces(key):
            _update_locally(members, one_device)
    for key in dict.fromkeys([*by_key, *keys]):
        if reduces(key):
            _update_reduced(key, by_key.get(key, []))


_distributed = dist.is_available()


def processes() -> bool:
    """Whether there are other processes to reduce over."""
    return _distributed and dist.is_initialized()


def _alike(states: list[DelayedScalingState]) -> Iterable[list[DelayedScalingState]]:
    """The states by recipe and direction; as a rule all have the same."""
    if len(states) < 2:
        return (states,) if states else ()
    groups: dict[tuple[Recipe, str], list[DelayedScalingState]] = {}
    recipe = mode = found = None
    for state in states:
        if found is None or state.recipe is not recipe or state.mode != mode:
            recipe, mode = state.recipe, state.mode
            found = groups.setdefault((recipe, mode), [])
        found.append(state)
    return groups.values()


def reduces(key: Key) -> bool:
    """Whether the amaxes of `key` are reduced over several processes."""
    recipe: Any = key.recipe
    if not (recipe.reduce_amax and processes()):
        return False
    return dist.get_world_size(key.group) > 1


def _update_locally(states: list[DelayedScalingState], one_device: bool) -> None:
    compiling = torch.compiler.is_compiling()
    if one_device and (compiling or all(s.device == states[0].device for s in states)):
        _update(states, None)  # none has moved since it was used
        return
    for group in group_by_device(states, lambda state: state.device).values():
        _update(group, None)


def _update(states: list[DelayedScalingState], amaxes: torch.Tensor | None) -> None:
    """Update states of one key on one device; `amaxes` as in the kernel `scale_update`."""
    recipe = states[0].recipe
    compiling = torch.compiler.is_compiling()
    before = {} if compiling else _copies([s for s in states if s.keeps_scales])
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        _update_with_functions(states, amaxes)
    else:
        scale_update(
            [s.amax_history for s in states],
            [s.scale for s in states],
            [s.ready for s in states],
            amaxes,
            states[0].limit,
            recipe.amax_compute_algo,
        )
    if not compiling:
        for state in states:
            state.updated(before.get(state))
        _learn_readiness(states)


def _copies(states: list[DelayedScalingState]) -> dict[DelayedScalingState, Scales]:
    """The scales as they are, for forwards that a later backward pass recomputes."""
    if not states:
        return {}
    tensors = [s.scale for s in states] + [s.ready for s in states]
    copies = torch._foreach_add(tensors, 0.0)  # one launch for all of them
    pairs = zip(copies, copies[len(states) :], strict=False)
    return {
        state: Scales(*pair, tuple(state.unset)) for state, pair in zip(states, pairs, strict=True)
    }


@torch.no_grad()
def _update_with_functions(states: list[DelayedScalingState], amaxes: torch.Tensor | None) -> None:
    recipe, limit = states[0].recipe, states[0].limit
    algorithm, scaling = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo

    def choose(history: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if callable(algorithm):
            return algorithm(history)
        return history_amax(history, last, algorithm)

    fp8_max = MAX[states[0].dtype]

    def rule(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if scaling is not None:
            return scaling(amax, scale, fp8_max, recipe)
        return next_scale(amax, scale, limit)

    sizes = [s.num_quantizers for s in states]
    parts = [None] * len(states) if amaxes is None else amaxes.split(sizes)
    for state, part in zip(states, parts, strict=True):
        custom_scale_update(state.amax_history, state.scale, state.ready, part, choose, rule)


def _learn_readiness(states: list[DelayedScalingState]) -> None:
    """Read back which slots have a scale now: once or twice in a state's life, one copy a device.

    From then on the host knows it, and their casts need no amax of their own first.
    """
    asking = [s for s in states if any(s.cast_unset)]
    if not asking or asking[0].device.type == "meta":  # states there begin anew when they move
        return
    ready = torch.cat([s.ready for s in asking]).tolist()
    for state in asking:
        mine, ready = ready[: state.num_quantizers], ready[state.num_quantizers :]
        state.unset = [u and not r for u, r in zip(state.unset, mine, strict=True)]
        state.cast_unset = [c and u for c, u in zip(state.cast_unset, state.unset, strict=True)]


class _Share(NamedTuple):
    """The part of the buffer that lives on one device."""

    states: list[DelayedScalingState]
    places: list[int]  # which slots of the key


def _update_reduced(key: Key, used: list[DelayedScalingState]) -> None:
    """One MAX all-reduce over every slot of `key` in registration order, then the update.

    States on several devices: each device's part is gathered to the device of the first registered
    state in one copy, and scattered back in one.
    """
    for member in used:
        register(member)
    slots = registered_slots(key)
    alive = [(place, state) for place, slot in enumerate(slots) if (state := slot.state())]
    if not alive:
        return
    first = alive[0][1].device
    groups = group_by_device(alive, lambda pair: pair[1].device)
    shares = {
        device: _Share([s for _, s in pairs], [p for p, _ in pairs])
        for device, pairs in groups.items()
    }
    with on_device(first):
        buffer = _gather(shares, [slot.size for slot in slots], set(used), first)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=key.group)
        pieces = buffer.split([slot.size for slot in slots])
        amaxes = {
            device: torch.cat([pieces[place] for place in share.places]).to(device)
            for device, share in shares.items()
        }
    for device, share in shares.items():
        _update(share.states, amaxes[device])


def _gather(
    shares: dict[torch.device, _Share],
    sizes: list[int],
    used: set[DelayedScalingState],
    first: torch.device,
) -> torch.Tensor:
    """The buffer: every slot's accumulated amaxes, zeros (neutral to MAX) where unused or dead."""
    pieces = [torch.zeros(size, device=first) for size in sizes]
    for share in shares.values():
        rows = [s.amax_history[0] if s in used else torch.zeros_like(s.scale) for s in share.states]
        moved = torch.cat(rows).to(first)
        parts = moved.split([row.numel() for row in rows])
        for place, part in zip(share.places, parts, strict=True):
            pieces[place] = part
    return torch.cat(pieces)


def discard(states: list[DelayedScalingState]) -> None:
    """Drop what was accumulated since the last update, so that it cannot leak into the next."""
    for state in states:
        state.amax_history[0].zero_()


def settle(used: Used) -> None:
    """Finalize all states of `used` in which something was recorded, and forget them."""
    states = [state for state, what in used.states.items() if what > 0]
    one_device = len(used.devices) == 1
    used.clear()
    if states:
        finalize(states, one_device)


def register_reduced(states: Iterable[DelayedScalingState]) -> None:
    """Register those of `states` whose amaxes are reduced, in their order.

    The order must be that of the forwards, which is the same on every rank; nodes of a backward
    pass run in any order when there are several devices.
    """
    if processes():
        for state in states:
            if reduces(key_of(state)):
                register(state)
