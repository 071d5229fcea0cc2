"""Where tensors and modules live: the operands' device, a module's device, grouping by device."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from quaver.errors import DeviceMismatchError

T = TypeVar("T")

_REMEDY = "move one of them, or dispatch the model"


def operands_device(names: Iterable[str], tensors: Iterable[torch.Tensor | None]) -> torch.device:
    """The one device of all `tensors`; None is passed over.

    Args:
        names: what the user calls each tensor, for the error.
        tensors: as many tensors, at least one of them not None.

    Raises:
        DeviceMismatchError: two tensors lie on two devices; names both tensors and both devices.
    """
    device: torch.device | None = None
    first = ""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if device is None:
            device, first = tensor.device, name
        elif tensor.device != device:
            raise DeviceMismatchError(
                f"{first} and {name} must be on one device, but {first} is on {device} "
                f"and {name} is on {tensor.device}; {_REMEDY}"
            )
    if device is None:
        raise ValueError("operands_device needs at least one tensor")
    return device


def get_module_device(module: nn.Module) -> torch.device | None:
    """The device of `module`, from its parameters and buffers; None if it has neither.

    Tensors on the meta device count only when there are no others (they are placeholders).

    Raises:
        DeviceMismatchError: they lie on several devices; names two tensors and their devices.
    """
    name, device = "", None
    for other_name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if device is None or (device.type == "meta" and tensor.device.type != "meta"):
            name, device = other_name, tensor.device
        elif tensor.device != device and tensor.device.type != "meta":
            raise DeviceMismatchError(
                f"a module with one device is needed, but its {name} is on {device} "
                f"and its {other_name} is on {tensor.device}; ask one of its submodules"
            )
    return device


def group_by_device(
    items: Iterable[T], device_of: Callable[[T], torch.device]
) -> dict[torch.device, list[T]]:
    """`items` by device, in their order; the devices in the order of their first item."""
    groups: dict[torch.device, list[T]] = {}
    for item in items:
        groups.setdefault(device_of(item), []).append(item)
    return groups
