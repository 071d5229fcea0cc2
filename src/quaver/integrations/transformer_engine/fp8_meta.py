"""`fp8_meta`: a view of a module's recipe states, in the form that scripts read and write."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from quaver.devices import default_device, get_module_device
from quaver.integrations.transformer_engine.extension import DType, dtype_of
from quaver.integrations.transformer_engine.recipes import default_recipe
from quaver.nn import QuantizedModule
from quaver.scaling import DelayedScalingState, RecipeState, current_region

STATE_KEYS = {"scaling_fwd": "forward", "scaling_bwd": "backward"}


class StateView:
    """One recipe state: `scale`, `amax_history` and `scale_inv` are its own tensors, or read them.

    Assigning to one of the first two writes the values into the state, wherever they come from;
    the state stays on its module's device.
    """

    def __init__(self, state: RecipeState) -> None:
        self._state = state

    @property
    def recipe(self) -> Any:
        """What the state follows."""
        return self._state.recipe

    @property
    def num_quantizers(self) -> int:
        """How many slots there are."""
        return self._state.num_quantizers

    @property
    def dtype(self) -> DType:
        """The FP8 format."""
        return dtype_of(self._delayed().dtype)

    @property
    def scale(self) -> torch.Tensor:
        """float32 [n]; multiplies before the cast."""
        return self._delayed().scale

    @scale.setter
    def scale(self, value: torch.Tensor) -> None:
        _write(self._delayed().scale, value)

    @property
    def amax_history(self) -> torch.Tensor:
        """float32 [amax_history_len, n]."""
        return self._delayed().amax_history

    @amax_history.setter
    def amax_history(self, value: torch.Tensor) -> None:
        _write(self._delayed().amax_history, value)

    @property
    def scale_inv(self) -> torch.Tensor:
        """float32 [n], computed from `scale`: what is written to it has no effect."""
        return self.scale.reciprocal()

    def _delayed(self) -> DelayedScalingState:
        if not isinstance(self._state, DelayedScalingState):
            raise AttributeError(
                f"the state of {type(self._state.recipe).__name__} has no scales: they come from "
                "the tensors themselves"
            )
        return self._state


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    if value is not target:
        with torch.no_grad():
            target.copy_(value)


class Fp8Meta(MutableMapping[str, Any]):
    """The mapping `module.fp8_meta`.

    "scaling_fwd" and "scaling_bwd" are the module's states, made when they are first asked for;
    "recipe", "num_gemms" and "fp8_group" are read from the module. What else is written is kept.
    """

    def __init__(self, module: QuantizedModule, notes: dict[str, Any]) -> None:
        self._module = module
        self._notes = notes

    def __getitem__(self, key: str) -> Any:
        if key in STATE_KEYS:
            return StateView(self._state(STATE_KEYS[key]))
        if key in self._notes:
            return self._notes[key]
        if key == "recipe":
            return self._recipe()
        if key == "num_gemms":
            return self._module.num_gemms
        if key == "fp8_group":
            region = current_region()
            return None if region is None else region.group
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in STATE_KEYS:
            view = self[key]
            view.scale, view.amax_history = value.scale, value.amax_history
        else:
            self._notes[key] = value

    def __delitem__(self, key: str) -> None:
        if key in STATE_KEYS:
            self._module.recipe_states.pop(STATE_KEYS[key], None)
            self._module._prepared = None
        else:
            del self._notes[key]

    def __iter__(self) -> Iterator[str]:
        states = [k for k, mode in STATE_KEYS.items() if mode in self._module.recipe_states]
        yield from dict.fromkeys([*states, "recipe", "num_gemms", "fp8_group", *self._notes])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return key in list(iter(self))

    def _recipe(self) -> Any:
        state = self._module.recipe_states.get("forward")
        if state is not None:
            return state.recipe
        region = current_region()
        return (None if region is None else region.recipe) or default_recipe()

    def _state(self, mode: str) -> RecipeState:
        module = self._module
        if mode not in module.recipe_states:
            device = get_module_device(module) or default_device()
            module._refresh_states(module.recipe or self._recipe(), device)
        return module.recipe_states[mode]
