"""Scaling states as loaders see them that know parameters and buffers only."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import torch
from torch import nn

KEY = "_extra_state"
_ON_DISK = "_extra_state_on_disk"


class ExtraStateAsBuffer(nn.Module):
    """Mixin: writing the extra state as if it were a buffer sets it.

    accelerate's `load_checkpoint_and_dispatch` takes each entry of a checkpoint for a parameter or
    a buffer, asks `_buffers` for the name, and writes the value there. A buffer of that name would
    cost device memory, travel with each broadcast, and be filled with whatever memory held by
    loaders that make missing buffers. So there is none: `_buffers` answers to the name, and hands
    the value to `set_extra_state`. No buffer is listed that does not exist.
    """

    @property
    def _buffers(self) -> Any:
        return _Buffers(self)

    @_buffers.setter
    def _buffers(self, buffers: dict[str, torch.Tensor | None]) -> None:
        self.__dict__["_buffers"] = buffers

    @property
    def _extra_state(self) -> torch.Tensor:
        state: torch.Tensor = self.get_extra_state()
        return state

    @_extra_state.setter
    def _extra_state(self, value: object) -> None:
        """Nothing: transformers sets uninitialized memory here where a checkpoint has no state."""


class _Buffers(UserDict[str, Any]):
    """A module's own dictionary of buffers, and the extra state for those who ask by name."""

    def __init__(self, module: nn.Module) -> None:
        self.data = module.__dict__["_buffers"]
        self._module = module

    def __contains__(self, key: object) -> bool:
        return key == KEY or key in self.data

    def __getitem__(self, key: str) -> Any:
        return self._module.get_extra_state() if key == KEY else self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key != KEY:
            self.data[key] = value
        elif value.device.type == "meta":  # accelerate wrote the value to disk
            self._module.__dict__.update({_ON_DISK: True, "_prepared": None})
        else:
            self._module.__dict__.pop(_ON_DISK, None)
            self._module.set_extra_state(value)

    def discard(self, key: str) -> None:
        """Remove a buffer if there is one; nn.Module asks for it where it finds no `dict`."""
        self.data.pop(key, None)

    def copy(self) -> dict[str, Any]:  # type: ignore[override]
        """The buffers alone."""
        return dict(self.data)


def read_offloaded_state(module: nn.Module) -> bool:
    """Set the extra state from where accelerate's disk offload left it, with the weights.

    Its hooks bring parameters and buffers for each forward, and nothing else.

    Returns:
        Whether there was one.
    """
    module.__dict__.pop(_ON_DISK, None)
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        weights = getattr(each, "weights_map", None)
        if weights is None:
            continue
        prefix = getattr(weights, "prefix", "")
        if f"{prefix}{KEY}" in list(weights):
            module.set_extra_state(weights[KEY])
            return True
    return False


def find_offloaded_state(module: nn.Module) -> None:
    """`read_offloaded_state`, where a loader has left the state on disk; said if it is not there.

    Raises:
        CheckpointError: what was found is no extra state.
    """
    if module.__dict__.get(_ON_DISK) and not read_offloaded_state(module):
        name = getattr(module, "qualified_name", "") or type(module).__name__
        warnings.warn(
            f"the scales of {name} went to disk with its weights, and are not found there; read "
            "them with load_state_dict before dispatch_model, or calibrate the model",
            stacklevel=2,
        )
