"""The current device: read, set for a block, and pinned across a call.

Only accelerators have a current device. For the CPU and for meta tensors every function here does
nothing. The functions dispatch on a device's *type*: `torch.accelerator` is one backend only, and
it is not the GPU's when a simulated backend is registered beside it.
"""

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch

_WITHOUT_CURRENT = frozenset({"cpu", "meta"})


class _Backend(NamedTuple):
    """How one device type reads and exchanges its current device."""

    current: Callable[[], int]
    exchange: Callable[[int], int]


_backends: dict[str, _Backend] = {}


def _backend(device_type: str) -> _Backend:
    found = _backends.get(device_type)
    if found is None:
        module = torch.get_device_module(device_type)
        exchange = getattr(module, "_exchange_device", None)
        if exchange is None:  # a backend without it: two calls instead of one

            def exchange(index: int) -> int:
                previous: int = module.current_device()
                module.set_device(index)
                return previous

        current = module.current_device
        if device_type == "cuda":  # the module's function initializes CUDA first: 3 times the cost
            current = torch._C._cuda_getDevice
        found = _backends[device_type] = _Backend(current, exchange)
    return found


def has_current(device: torch.device) -> bool:
    """Whether devices of this type have a current one (accelerators do)."""
    return device.type not in _WITHOUT_CURRENT


def current_device(device_type: str) -> torch.device:
    """The current device of `device_type` on this thread; the CPU is its own current device."""
    if device_type in _WITHOUT_CURRENT:
        return torch.device(device_type)
    return torch.device(device_type, _backend(device_type).current())


def pin(device: torch.device) -> int:
    """Make `device` current and return what `unpin` needs to restore the previous one.

    Returns -1, after one integer compare, when `device` is current already or has no current.
    """
    if device.type in _WITHOUT_CURRENT:
        return -1
    backend = _backend(device.type)
    index = device.index
    if index == backend.current():
        return -1
    return backend.exchange(index)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what was launched; the CPU has nothing left to do."""
    if has_current(device):
        torch.get_device_module(device.type).synchronize(device)


def raw_stream(index: int) -> int:
    """The current stream of GPU `index` on this thread, as a launch takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def unpin(device: torch.device, previous: int) -> None:
    """Undo `pin(device)`, which returned `previous`."""
    if previous >= 0:
        _backend(device.type).exchange(previous)


_launch_checks: dict[str, Callable[..., None] | None] = dict.fromkeys(_WITHOUT_CURRENT)


def launch_check(device_type: str) -> Callable[..., None] | None:
    """What devices of this type have to say on a launch; None: nothing.

    Simulated devices fail where a real one would: an operand of another device than the current.
    """
    if device_type not in _launch_checks:
        module = torch.get_device_module(device_type)
        _launch_checks[device_type] = getattr(module, "check_launch", None)
    return _launch_checks[device_type]


class on_device:  # noqa: N801 - reads as a statement: `with on_device(x.device):`
    """Context manager: `device` is current inside; the previous one comes back, also on an error.

    Under torch.compile it does nothing: aten ops and Quaver's kernels guard themselves at run time.
    """

    __slots__ = ("_device", "_previous")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._previous = -1

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self._previous = pin(self._device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous >= 0:
            unpin(self._device, self._previous)
