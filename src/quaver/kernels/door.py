"""The one door to the kernels: every launch passes here, and only here.

It finds the operands' device, refuses operands on two devices, makes the device current for the
launch, and picks the implementation for the device's type.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quaver.devices import autocast_dtype, current_device, launch_check, operands_device, pin, unpin


class Launch(NamedTuple):
    """One launch: the kernel's name, its operands' device, the current device of the moment."""

    kernel: str
    device: torch.device
    current: torch.device


class Kernel:
    """A kernel: a plain PyTorch reference, and faster versions for some device types.

    Args:
        reference: runs on every device; the others must equal it (bit for bit for casts).
        by_device_type: faster versions with the reference's signature.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        by_device_type: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.name = reference.__name__
        self.parameters = tuple(inspect.signature(reference).parameters)
        self.reference = reference
        self.by_device_type = by_device_type or {}

    def implementation(self, device: torch.device) -> Callable[..., Any]:
        """The version that runs on `device`."""
        return self.by_device_type.get(device.type, self.reference)


def launch(kernel: Kernel, *args: Any) -> Any:
    """Run `kernel` on `args` with their device current.

    Args:
        args: the kernel's arguments in its order; tensors, and sequences of tensors, are operands.

    Raises:
        DeviceMismatchError: operands lie on two devices; nothing ran.
    """
    names, tensors = _operands(kernel, args)
    device = operands_device(names, tensors)
    previous = pin(device)
    try:
        if _logs:
            _log(kernel, device)
        check = launch_check(device.type)
        if check is not None:
            check(*tensors)
        run = kernel.implementation(device)
        if autocast_dtype(device.type) is None:
            return run(*args)
        with torch.autocast(device.type, enabled=False):  # kernels say themselves what they round
            return run(*args)
    finally:
        unpin(device, previous)


def _operands(kernel: Kernel, args: Sequence[Any]) -> tuple[list[str], list[torch.Tensor]]:
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, arg in zip(kernel.parameters, args, strict=False):  # defaults may be left out
        if isinstance(arg, torch.Tensor):
            names.append(name)
            tensors.append(arg)
        elif isinstance(arg, list | tuple):
            for i, item in enumerate(arg):
                if isinstance(item, torch.Tensor):
                    names.append(f"{name}[{i}]")
                    tensors.append(item)
    return names, tensors


_logs: list[list[Launch]] = []
_logs_lock = threading.Lock()


def _log(kernel: Kernel, device: torch.device) -> None:
    entry = Launch(kernel.name, device, current_device(device.type))
    with _logs_lock:
        for log in _logs:
            log.append(entry)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect every launch through the door while the block runs, of all threads."""
    log: list[Launch] = []
    with _logs_lock:
        _logs.append(log)
    try:
        yield log
    finally:
        with _logs_lock:
            _logs[:] = [other for other in _logs if other is not log]
