"""The only place that knows device types: placement, guards, capability and caches by device."""

from quaver.devices.caches import DeviceCache, scratch
from quaver.devices.capability import (
    autocast_dtype,
    capability,
    default_device,
    fp8_gemm_path,
    has_fp8_block_gemm,
    has_fp8_gemm,
    is_fp8_available,
    runs_triton,
)
from quaver.devices.generators import (
    RngStates,
    default_generators,
    drawn_from,
    rng_states,
    rng_states_set,
)
from quaver.devices.guard import (
    current_device,
    has_current,
    launch_check,
    on_device,
    pin,
    raw_stream,
    synchronize,
    unpin,
)
from quaver.devices.placement import get_module_device, group_by_device, operands_device

__all__ = [
    "DeviceCache",
    "RngStates",
    "autocast_dtype",
    "capability",
    "current_device",
    "default_device",
    "default_generators",
    "drawn_from",
    "fp8_gemm_path",
    "get_module_device",
    "group_by_device",
    "has_current",
    "has_fp8_block_gemm",
    "has_fp8_gemm",
    "is_fp8_available",
    "launch_check",
    "on_device",
    "operands_device",
    "pin",
    "raw_stream",
    "rng_states",
    "rng_states_set",
    "runs_triton",
    "scratch",
    "synchronize",
    "unpin",
]
