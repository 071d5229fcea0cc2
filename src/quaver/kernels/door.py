"""The one door to the kernels: every launch passes here, and only here.

It finds the operands' device, refuses operands on two devices, makes the device current for the
launch, and picks the implementation for the device's type.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch

from quaver.devices import (
    autocast_dtype,
    current_device,
    launch_check,
    operands_device,
    pin,
    runs_triton,
    unpin,
)
from quaver.devices.settings import IMPLEMENTATION
from quaver.errors import QuaverError

Implementation = Literal["reference", "triton"]


class Launch(NamedTuple):
    """One launch: the kernel's name, its operands' device, the current device of the moment."""

    kernel: str
    device: torch.device
    current: torch.device


class Kernel:
    """A kernel: a plain PyTorch reference, and a faster version for GPUs.

    Args:
        reference: runs on every device; the other version must equal it (bit for bit for casts).
            Its annotations say which arguments are operands.
        triton: the module that has the version of the same name, imported when first needed.
        native: a version on torch's own GPU operators, instead of Triton's.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        triton: str | None = None,
        native: Callable[..., Any] | None = None,
    ) -> None:
        parameters = inspect.signature(reference).parameters
        self.name = reference.__name__
        self.parameters = tuple(parameters)
        annotations = [str(p.annotation) for p in parameters.values()]
        operands = [i for i, text in enumerate(annotations) if _takes_tensors(text)]
        self.lists = tuple(i for i in operands if "list" in annotations[i])
        self.operands = tuple(i for i in operands if i not in self.lists)
        self.reference = reference
        self._triton = triton
        self._native = native
        self._chosen: dict[str, Callable[..., Any]] = {}
        _kernels.append(self)

    def implementation(self, device: torch.device) -> Callable[..., Any]:
        """The version that runs on `device`, or on any if `use_implementation` says so."""
        chosen = self._chosen.get(device.type)
        if chosen is None:
            chosen = self._chosen[device.type] = self._choose(device.type)
        return chosen

    def _choose(self, device_type: str) -> Callable[..., Any]:
        forced = _forced[-1]
        if forced == "reference" or (forced is None and not runs_triton(device_type)):
            return self.reference
        if self._triton is not None:
            version: Callable[..., Any] = getattr(import_module(self._triton), self.name)
            return version
        if self._native is not None and runs_triton(device_type):
            return self._native
        return self.reference


def _takes_tensors(annotation: str) -> bool:
    return "Tensor" in annotation and "Callable" not in annotation


_kernels: list[Kernel] = []
_forced: list[str | None] = [None]


def _force(implementation: str | None) -> None:
    if implementation not in (None, "reference", "triton"):
        raise QuaverError(
            f'the implementation must be "reference" or "triton", not {implementation!r}'
        )
    _forced.append(implementation)
    for kernel in _kernels:
        kernel._chosen.clear()


_force(IMPLEMENTATION)


@contextmanager
def use_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Inside, every kernel of the process runs in the version that is named.

    Args:
        implementation: "reference" for plain PyTorch everywhere; "triton" for the Triton versions
            everywhere, which off a GPU needs Triton's interpreter (TRITON_INTERPRET=1); None for
            each device's best. The environment variable QUAVER_IMPLEMENTATION sets it, too.

    Raises:
        QuaverError: another name.
    """
    _force(implementation)
    try:
        yield
    finally:
        _forced.pop()
        for kernel in _kernels:
            kernel._chosen.clear()


def launch(kernel: Kernel, *args: Any) -> Any:
    """Run `kernel` on `args` with their device current.

    Args:
        args: the kernel's arguments in its order; tensors, and sequences of tensors, are operands.

    Raises:
        DeviceMismatchError: operands lie on two devices; nothing ran.
    """
    device = _device(kernel, args)
    previous = pin(device)
    try:
        if _logs:
            _log(kernel, device)
        device_type = device.type
        check = launch_check(device_type)
        if check is not None:
            check(*args)
        run = kernel._chosen.get(device_type) or kernel.implementation(device)
        if autocast_dtype(device_type) is None:
            return run(*args)
        with torch.autocast(device_type, enabled=False):  # kernels say themselves what they round
            return run(*args)
    finally:
        unpin(device, previous)


def _device(kernel: Kernel, args: Sequence[Any]) -> torch.device:
    """The one device of the operands; the names, for an error, are looked up when there is one."""
    device: torch.device | None = None
    given = len(args)
    for i in kernel.operands:
        if i >= given:  # defaults may be left out
            break
        arg = args[i]
        if arg is not None:
            if device is None:
                device = arg.device
            elif arg.device != device:
                return operands_device(*_operands(kernel, args))
    for i in kernel.lists:
        for arg in args[i] or ():
            if device is None:
                device = arg.device
            elif arg.device != device:
                return operands_device(*_operands(kernel, args))
    return operands_device(*_operands(kernel, args)) if device is None else device


def _operands(kernel: Kernel, args: Sequence[Any]) -> tuple[list[str], list[torch.Tensor]]:
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, arg in zip(kernel.parameters, args, strict=False):
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
