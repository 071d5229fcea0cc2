"""The devices of torch.sim: their current one, their streams, and what they claim to be able to do.

The functions have the names and meanings of torch.cuda's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

DeviceLike: TypeAlias = torch.device | str | int | None


def device_index(device: DeviceLike = None) -> int:
    """Return a device's index; the current one's for None and for ``"sim"`` without an index.

    Raises:
        ValueError: the device is not a simulated one.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if device is not None and device.type != "sim":
        raise ValueError(f"Expected a sim device, but got: {device}")
    if device is None or device.index is None:
        return torch.accelerator.current_device_index()
    return device.index


def device(device: DeviceLike) -> AbstractContextManager[None]:
    """Make a device current inside ``with``; None and -1 change nothing.

    A function, not a class like torch.cuda's: torch.compile traces into it and meets torch's own
    guard, which it knows.
    """
    return torch.accelerator.device_index(None if device is None else device_index(device))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Make a tensor's device current inside ``with``; a tensor elsewhere changes nothing."""
    return device(tensor.device if tensor.device.type == "sim" else None)


def current_device() -> int:
    """Return the index of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    """Make a device this thread's current one; a negative index changes nothing."""
    torch._C._accelerator_setDeviceIndex(device_index(device))


def device_count() -> int:
    """Return how many devices were loaded."""
    return torch._C._accelerator_hooks_device_count()


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def synchronize(device: DeviceLike = None) -> None:
    """Wait for a device: nothing to do, since each op is done when its call returns."""
    torch._C._accelerator_synchronizeDevice(device_index(device))


# ---- streams and events: they carry their device, and nothing runs late ----------------------


def Stream(device: DeviceLike = None, priority: int = 0) -> torch.Stream:
    """Return a new stream of a device."""
    return torch.Stream(device=torch.device("sim", device_index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:
    """Return a new event; the time between two is always 0."""
    return torch.Event("sim", enable_timing=enable_timing)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return this thread's current stream of a device."""
    return torch._C._accelerator_getStream(device_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return a device's default stream."""
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=device_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream, and its device, this thread's current ones."""
    torch._C._accelerator_setStream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Make a stream current inside ``with``; None changes nothing."""
    return nullcontext() if stream is None else stream


# ---- what a device is ------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """What a simulated device claims to be: a Hopper with 8 GiB (in bytes) and one multiprocessor.

    Nothing enforces it: any op that the CPU has runs, and memory is the host's.
    """

    name: str = "sim"
    major: int = 9
    minor: int = 0
    total_memory: int = 8 << 30
    multi_processor_count: int = 1
    warp_size: int = 32


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return what a device claims to be."""
    return DeviceProperties()


def get_device_name(device: DeviceLike = None) -> str:
    """Return a device's name."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return a device's compute capability, (9, 0): that of a device with FP8 matrix products."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether bfloat16 works."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that torch.autocast may choose."""
    return [torch.float16, torch.bfloat16]
