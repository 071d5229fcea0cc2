"""What a device can do natively; what it cannot is emulated with the same bytes."""

import importlib.util
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


_has_triton = importlib.util.find_spec("triton") is not None


def runs_triton(device_type: str) -> bool:
    """Whether Triton compiles for devices of this type here."""
    return _has_triton and device_type == "cuda" and torch.version.hip is None


_products: dict[torch.device, tuple[bool, bool]] = {}


def _read_products(device: torch.device) -> tuple[bool, bool]:
    """Whether cuBLASLt multiplies FP8 on `device` with a scale a tensor, and in blocks of 128."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False, False
    chip = capability(device)
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    found = (chip >= (8, 9), chip[0] == 9 and version >= (12, 9))
    _products[device] = found
    return found


def has_fp8_gemm(device: torch.device) -> bool:
    """Whether cuBLASLt multiplies FP8 on `device`: GPUs from sm_89 on."""
    return (_products.get(device) or _read_products(device))[0]


def has_fp8_block_gemm(device: torch.device) -> bool:
    """Whether cuBLASLt multiplies FP8 in blocks of 128 on `device`: Hopper, from CUDA 12.9 on."""
    return (_products.get(device) or _read_products(device))[1]


def fp8_gemm_path(device: torch.device) -> str:
    """Which path an FP8 matrix product takes on `device`, in words for a report."""
    major, minor = capability(device)
    chip = f" (sm_{major}{minor})" if (major, minor) != (0, 0) else ""
    if not has_fp8_gemm(device):
        return f"emulated on {device}{chip}: dequantized operands, a float32 matrix product"
    blocks = "and of blocks of 128" if has_fp8_block_gemm(device) else "only"
    return (
        f"cuBLASLt on {device}{chip}: FP8 products with a scale a tensor {blocks}; the other "
        "formats emulated: dequantized operands"
    )


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
