"""The only place that knows device types: placement, guards, capability and caches by device."""

from quaver.devices.caches import DeviceCache, scratch
from quaver.devices.capability import (
    autocast_dtype,
    capability,
    default_device,
    fp8_gemm_path,
    is_fp8_available,
)
from quaver.devices.guard import (
    current_device,
    has_current,
    launch_check,
    on_device,
    pin,
    unpin,
)
from quaver.devices.placement import get_module_device, group_by_device, operands_device

__all__ = [
    "DeviceCache",
    "autocast_dtype",
    "capability",
    "current_device",
    "default_device",
    "fp8_gemm_path",
    "get_module_device",
    "group_by_device",
    "has_current",
    "is_fp8_available",
    "launch_check",
    "on_device",
    "operands_device",
    "pin",
    "scratch",
    "unpin",
]
