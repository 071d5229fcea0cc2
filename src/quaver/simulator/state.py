"""Memory and random numbers of torch.sim, device by device, with the names of torch.cuda's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quaver.simulator.device import DeviceLike, device_count, device_index


def _allocated(device: DeviceLike, what: str) -> int:
    stats = torch._C._accelerator_getDeviceStats(device_index(device))
    return int(stats["allocated_bytes"]["all"][what])


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that live tensors take on a device."""
    return _allocated(device, "current")


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that live tensors took on a device since the last reset."""
    return _allocated(device, "peak")


def memory_reserved(device: DeviceLike = None) -> int:
    """Return what ``memory_allocated`` does: the simulator caches no memory."""
    return _allocated(device, "current")


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let ``max_memory_allocated`` start again from what is allocated now."""
    torch._C._accelerator_resetPeakStats(device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return a device's free and total bytes."""
    return torch._C._accelerator_getMemoryInfo(device_index(device))


def empty_cache() -> None:
    """Do nothing: the simulator caches no memory."""


# ---- random numbers --------------------------------------------------------------------------


def default_generator(device: DeviceLike = None) -> torch.Generator:
    """Return the generator that a device's ops draw from."""
    generator: torch.Generator = torch.ops.quaver_sim.default_generator(device_index(device))
    return generator


def _generators() -> list[torch.Generator]:
    return [default_generator(i) for i in range(device_count())]


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator. torch.manual_seed does it too."""
    for generator in _generators():
        generator.manual_seed(seed)


def seed_all() -> None:
    """Seed every device's generator with one number that cannot be foretold."""
    manual_seed_all(torch.seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return default_generator().initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of a device's generator, a uint8 tensor on the CPU."""
    return default_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of a device's generator."""
    default_generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [generator.get_state() for generator in _generators()]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)
