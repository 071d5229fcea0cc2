"""A module's scaling states as one uint8 tensor for checkpoints: no pickle, of a fixed size.

Layout, little-endian: a header of 16 int32 (magic, version, capacity, then for each direction the
number of slots, the history's length, and whether there is a state; at the end the number of the
last forward, for random bits, and whether there is one), then for each direction float32: scale
[n], ready [n], history [capacity, n] (row 0 accumulating, then the oldest first; unused rows are
zero).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from quaver.errors import CheckpointError
from quaver.recipe import DelayedScaling
from quaver.scaling.delayed import DelayedScalingState, resized_history
from quaver.scaling.state import RecipeState
from quaver.scaling.te_state import te_bytes, te_content, te_states

MODES = ("forward", "backward")
_MAGIC = 0x51564552  # "QVER"
_VERSION = 1
_HEADER = 16
_NUMBER = 13  # the header's words 13 and 14: a forward's number; 15: whether there is one
_DEFAULT_CAPACITY = 1024


def pack(
    states: dict[str, RecipeState], sizes: dict[str, int], recipe: DelayedScaling | None
) -> torch.Tensor:
    """The states as a CPU uint8 tensor; all zeros, without touching a device, if there are none.

    Args:
        states: by direction.
        sizes: slots by direction, whether or not there is a state.
        recipe: the attached recipe, which can ask for a longer history than 1024.
    """
    capacity = max(_DEFAULT_CAPACITY, recipe.amax_history_len if recipe is not None else 0)
    words = _HEADER + sum(sizes[mode] * (2 + capacity) for mode in MODES)
    if not any(
        isinstance(state, DelayedScalingState) and state.device.type != "meta"
        for state in states.values()
    ):
        return torch.zeros(words * 4, dtype=torch.uint8)
    header = [_MAGIC, _VERSION, capacity]
    parts: list[torch.Tensor] = []
    for mode in MODES:
        state = cast(DelayedScalingState, states[mode])
        length = state.amax_history.shape[0]
        header += [state.num_quantizers, min(length, capacity), 1]
        history = state.amax_history
        if length != capacity:
            history = resized_history(history, capacity)
        parts += [state.scale, state.ready, history.flatten()]
    head = torch.tensor(header + [0] * (_HEADER - len(header)), dtype=torch.int32)
    body = torch.cat(parts).cpu()  # the one copy from the device
    return torch.cat([head.view(torch.uint8), body.view(torch.uint8)])


def unpack(
    packed: Any, sizes: dict[str, int], recipe: DelayedScaling | None
) -> dict[str, DelayedScalingState]:
    """The states that `pack` wrote, on the CPU; empty if there were none.

    Args:
        packed: what `pack` gave, or an extra state of TransformerEngine's.
        recipe: what the states shall follow; None: the default until they are used.

    Raises:
        CheckpointError: not such a tensor, or values that no scaling state can have.
    """
    foreign = te_bytes(packed)
    if foreign is not None:
        return te_states(foreign, sizes, recipe)
    if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
        given = f"{packed.dtype} {tuple(packed.shape)}" if torch.is_tensor(packed) else type(packed)
        raise CheckpointError(f"extra state must be a flat uint8 tensor of Quaver's, not {given}")
    packed = packed.detach().cpu().contiguous()
    if not (packed[: _NUMBER * 4].any() or packed[_HEADER * 4 :].any()):
        return {}
    if packed.numel() < _HEADER * 4:
        raise CheckpointError(f"extra state is cut short: {packed.numel()} bytes")
    header: list[int] = packed[: _HEADER * 4].clone().view(torch.int32).tolist()
    magic, version, capacity = header[:3]
    if magic != _MAGIC or version != _VERSION:
        raise CheckpointError(
            f"extra state is not Quaver's version {_VERSION} (magic {magic:#x}, version {version})"
        )
    expected = _HEADER + sum(sizes[mode] * (2 + capacity) for mode in MODES)
    if capacity < 1 or packed.numel() != expected * 4:
        raise CheckpointError(
            f"extra state must have {expected * 4} bytes for {sizes}, not {packed.numel()}"
        )
    body = packed[_HEADER * 4 :].clone().view(torch.float32)
    states: dict[str, DelayedScalingState] = {}
    for i, mode in enumerate(MODES):
        slots, length, present = header[3 + 3 * i : 6 + 3 * i]
        if slots != sizes[mode] or not 1 <= length <= capacity or present != 1:
            raise CheckpointError(
                f"extra state of direction {mode} must have {sizes[mode]} slots and a history of "
                f"1 to {capacity}, not {slots} and {length}"
            )
        mine, body = body[: slots * (2 + capacity)], body[slots * (2 + capacity) :]
        states[mode] = _restore(mine, mode, slots, length, recipe)
    return states


def check_unowned(packed: torch.Tensor) -> bool:
    """Check the extra state of a module that is not at hand; whether it is a pickle.

    Args:
        packed: uint8, on the CPU; the number of its slots is the one that it says itself.

    Raises:
        CheckpointError: it is neither Quaver's nor TransformerEngine's, or not sound.
    """
    data = te_bytes(packed)
    if data is not None:
        te_content(data)
        return True
    words = packed.flatten()[: _HEADER * 4].clone()
    header = words.view(torch.int32).tolist() if words.numel() == _HEADER * 4 else [0] * _HEADER
    unpack(packed, {mode: max(header[3 + 3 * i], 1) for i, mode in enumerate(MODES)}, None)
    return False


def _restore(
    body: torch.Tensor, mode: str, slots: int, length: int, recipe: DelayedScaling | None
) -> DelayedScalingState:
    scale, ready, flat = body[:slots], body[slots : 2 * slots], body[2 * slots :]
    history = flat.view(-1, slots)
    if not (torch.isfinite(scale).all() and (scale > 0).all()):
        raise CheckpointError(f"scales must be finite and positive, not {scale.tolist()}")
    if not ((ready == 0) | (ready == 1)).all():
        raise CheckpointError(f"every scale must be set (1) or not (0), not {ready.tolist()}")
    if torch.isnan(history).any() or (history < 0).any():
        raise CheckpointError("an amax history must hold no NaN and nothing negative")
    follow = recipe or DelayedScaling(amax_history_len=length)
    state = DelayedScalingState(follow, mode, slots, torch.device("cpu"))
    state.scale.copy_(scale)
    state.ready.copy_(ready)
    state.amax_history = resized_history(history, follow.amax_history_len)
    state.unset = [u and r == 0 for u, r in zip(state.unset, ready.tolist(), strict=True)]
    return state


def pack_number(packed: torch.Tensor, number: int | None) -> None:
    """Write the number of a module's last forward into what `pack` gave."""
    if number is not None:
        words = torch.tensor([number], dtype=torch.int64).view(torch.int32).tolist()
        packed[: _HEADER * 4].view(torch.int32)[_NUMBER:] = torch.tensor([*words, 1])


def unpack_number(packed: Any) -> int | None:
    """The number that `pack_number` wrote; None if there was none."""
    if te_bytes(packed) is not None:
        return None
    words = packed[: _HEADER * 4].detach().cpu().clone().view(torch.int32)
    if words.numel() < _HEADER or words[-1] != 1:
        return None
    return int(words[_NUMBER:-1].clone().view(torch.int64).item())
