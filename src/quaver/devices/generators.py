"""The default random number generators of all devices, and their states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

RngStates = Mapping[torch.device, torch.Tensor]
"""Generator states, uint8 on the CPU, by device."""


def default_generators() -> dict[torch.device, torch.Generator]:
    """The CPU's generator, and that of each accelerator of this process once they are initialized.

    Before that nothing can have been drawn there, and asking would initialize them.
    """
    found = {torch.device("cpu"): torch.default_generator}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator.type)
        if module.is_initialized():
            for index, generator in enumerate(getattr(module, "default_generators", ())):
                found[torch.device(accelerator.type, index)] = generator
    return found


def rng_states() -> dict[torch.device, torch.Tensor]:
    """The states of all default generators. Host memory is read; no device is waited for."""
    return {device: generator.get_state() for device, generator in default_generators().items()}


def drawn_from(before: RngStates) -> dict[torch.device, torch.Tensor]:
    """Those of the states `before` whose generators have been drawn from or seeded since."""
    now = rng_states()
    # Compared by NumPy: a policy that watches torch's operations is not to see any of ours.
    return {d: s for d, s in before.items() if not np.array_equal(s.numpy(), now[d].numpy())}


@contextmanager
def rng_states_set(states: RngStates) -> Iterator[None]:
    """Context manager: the generators of these devices have `states` inside.

    What they had before comes back at the end, also after an error; others are left alone.
    """
    generators = default_generators()
    previous = {device: generators[device].get_state() for device in states}
    try:
        for device, state in states.items():
            generators[device].set_state(state)
        yield
    finally:
        for device, state in previous.items():
            generators[device].set_state(state)
