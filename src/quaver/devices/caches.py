"""Caches whose keys carry the device, so that two devices never share an entry."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

V = TypeVar("V")


class DeviceCache(Generic[V]):
    """Values by (device type, device index, key), each made once on its device.

    `make` gets the device with its index; the caller allocates there, not on the current device.
    """

    def __init__(self, make: Callable[[torch.device, Hashable], V]) -> None:
        self._make = make
        self._values: dict[tuple[str, int, Hashable], V] = {}
        self._lock = threading.Lock()

    def get(self, device: torch.device, key: Hashable = None) -> V:
        """The value of `device` and `key`, the same object at every call."""
        full_key = (device.type, _index(device), key)
        try:
            return self._values[full_key]
        except KeyError:
            with self._lock:
                if full_key not in self._values:
                    self._values[full_key] = self._make(device, key)
                return self._values[full_key]


def _index(device: torch.device) -> int:
    if device.index is None and device.type not in ("cpu", "meta"):
        raise ValueError(f"a device with an index is needed, such as a tensor's, not {device}")
    return device.index or 0


class _Scratch(threading.local):
    """Per thread: two threads that work on one device must not write into one buffer."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int, str, torch.dtype], torch.Tensor] = {}


_scratch = _Scratch()


def scratch(device: torch.device, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of `numel` elements on `device` for temporary results, contents undefined.

    The same memory comes back at the next request of this thread for the same device, name and
    dtype, grown when a larger one is asked for; so a caller must be done with it by then.
    """
    key = (device.type, _index(device), name, dtype)
    buffer = _scratch.buffers.get(key)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):
            buffer = torch.empty(numel, dtype=dtype, device=device)
        _scratch.buffers[key] = buffer
    return buffer[:numel]
