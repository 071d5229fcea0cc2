"""Named random number streams that are apart from the default one, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quaver.devices import default_generators
from quaver.errors import QuaverError

States = dict[str, dict[torch.device, torch.Tensor]]


class RNGStatesTracker:
    """Random number streams by name, each with a state for every device.

    Ranks that hold parts of one tensor draw from a stream with a seed of their own, and from the
    default stream what must be equal on all of them. On each device a stream begins with the same
    seed.
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._states: States = {}

    def reset(self) -> None:
        """Forget all streams."""
        self._seeds.clear()
        self._states.clear()

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            QuaverError: there is one of this name, or with this seed.
        """
        if name in self._states:
            raise QuaverError(f"a random number stream {name!r} exists already; call reset() first")
        if seed in self._seeds.values():
            raise QuaverError(f"seed {seed} is another stream's, which would repeat its numbers")
        self._seeds[name] = seed
        self._states[name] = {}

    def get_states(self) -> States:
        """The states of all streams by device; later draws do not change what was returned."""
        return {name: dict(states) for name, states in self._states.items()}

    def set_states(self, states: States) -> None:
        """Go on from what `get_states` gave; streams that it does not have are forgotten.

        Raises:
            QuaverError: `states` is not by name and device.
        """
        for name, by_device in states.items():
            if not isinstance(by_device, dict):
                raise QuaverError(
                    f"the states of stream {name!r} must be a dictionary by device, as get_states()"
                    f" gives, not {type(by_device).__name__}"
                )
        self._states = {name: dict(by_device) for name, by_device in states.items()}
        self._seeds = {name: seed for name, seed in self._seeds.items() if name in states}

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Context manager: what is drawn inside comes from the stream `name`, on every device.

        Raises:
            QuaverError: there is no such stream.
        """
        if name not in self._states:
            known = ", ".join(self._states) or "none"
            raise QuaverError(f"there is no random number stream {name!r} (known: {known}); add it")
        generators = default_generators()
        previous = {device: generator.get_state() for device, generator in generators.items()}
        states = self._states[name]
        try:
            for device, generator in generators.items():
                if device in states:
                    generator.set_state(states[device])
                else:  # met here for the first time
                    generator.manual_seed(self._seed(name))
            yield
        finally:
            self._states[name] = {d: generators[d].get_state() for d in previous}
            for device, state in previous.items():
                generators[device].set_state(state)

    def _seed(self, name: str) -> int:
        if name not in self._seeds:
            raise QuaverError(
                f"stream {name!r} was loaded without a state for each device of this process; add "
                "it anew, or load what was saved with as many devices"
            )
        return self._seeds[name]
