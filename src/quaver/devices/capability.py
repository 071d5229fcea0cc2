"""What a device can do natively; what it cannot is emulated with the same bytes."""

from collections.abc import Hashable

import torch

from quaver.devices.caches import DeviceCache
from quaver.devices.guard import current_device


def _read_capability(device: torch.device, key: Hashable) -> tuple[int, int]:
    if device.type in ("cpu", "meta"):
        return (0, 0)
    major, minor = torch.get_device_module(device.type).get_device_capability(device)
    return (int(major), int(minor))


_capabilities: DeviceCache[tuple[int, int]] = DeviceCache(_read_capability)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor) of `device`; (0, 0) where there is no such thing."""
    return _capabilities.get(device)


def fp8_gemm_path(device: torch.device) -> str:
    """Which path an FP8 matrix product takes on `device`, in words for a report."""
    major, minor = capability(device)
    chip = f" (sm_{major}{minor})" if (major, minor) != (0, 0) else ""
    return f"emulated on {device}{chip}: dequantized operands, a float32 matrix product"


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of `torch.autocast` for this device type; None where it is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def default_device() -> torch.device:
    """The device that a user who names none means: the current accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else current_device(accelerator.type)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 runs here. It does on every machine: what hardware lacks is emulated.

    Args:
        return_reason: also return, as a string, which path the FP8 products take on the current
            device.
    """
    return (True, fp8_gemm_path(default_device())) if return_reason else True
