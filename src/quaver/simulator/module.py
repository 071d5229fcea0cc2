"""``torch.sim``: this module, once the simulator is loaded. It mirrors torch.cuda.

torch and the libraries around it find a device type's module by its name and ask it for what they
would ask torch.cuda.
"""

import torch

from quaver.simulator.device import (
    DeviceProperties,
    Event,
    Stream,
    current_device,
    current_stream,
    default_stream,
    device,
    device_count,
    device_of,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_available,
    is_bf16_supported,
    set_device,
    set_stream,
    stream,
    synchronize,
)
from quaver.simulator.launch import AcceleratorError, check_launch, device_of_pointer
from quaver.simulator.state import (
    default_generator,
    empty_cache,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    max_memory_allocated,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    reset_peak_memory_stats,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

__all__ = [
    "AcceleratorError",
    "DeviceProperties",
    "Event",
    "Stream",
    "check_launch",
    "current_device",
    "current_stream",
    "default_generator",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "device_of_pointer",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


# Of each device, in order; filled when the simulator is loaded.
default_generators: list[torch.Generator] = []


def is_initialized() -> bool:
    """Return True: the simulator is ready once it is loaded."""
    return True


def init() -> None:
    """Do nothing: the simulator is ready once it is loaded."""


# ---- what torch itself calls -----------------------------------------------------------------

_lazy_init = init
_is_compiled = is_initialized


def _is_in_bad_fork() -> bool:
    return False


_exchange_device = torch._C._accelerator_exchangeDevice
_maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
