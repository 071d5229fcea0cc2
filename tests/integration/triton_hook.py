"""Triton's own word on each launch, beside the log of the door."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from quaver.devices import current_device
from quaver.testing import Launch


class Hooked(NamedTuple):
    """One launch by Triton: its kernel, its operands' device, the device that was current."""

    kernel: str
    device: torch.device
    current: torch.device


@contextmanager
def triton_launches(log: Sequence[Launch]) -> Iterator[list[Hooked]]:
    """Collect what Triton launches while the block runs.

    On a GPU it is Triton's hook that says so, which is called right before a kernel is handed to
    the driver, by Triton and by Quaver's prepared launchers alike. Its interpreter has no hook:
    there its launches are watched.

    Args:
        log: that of the door. Its last entry is the kernel that launches, so no two devices may
            launch at a time.
    """
    hooked: list[Hooked] = []

    def note(name: str) -> None:
        last = log[-1]
        current = current_device(last.device.type)
        hooked.append(Hooked(f"{last.kernel}: {name}", last.device, current))

    if find_spec("triton") is None:
        yield hooked
        return
    watch = _by_hook if torch.cuda.is_available() else _in_interpreter
    with watch(note):
        yield hooked


@contextmanager
def _by_hook(note: Callable[[str], None]) -> Iterator[None]:
    enter = import_module("triton").knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        note(metadata.get()["name"])

    enter.add(hook)
    try:
        yield
    finally:
        enter.remove(hook)


@contextmanager
def _in_interpreter(note: Callable[[str], None]) -> Iterator[None]:
    executor = import_module("triton.runtime.interpreter").GridExecutor
    run = executor.__call__

    def noted(self: Any, *args: Any, **meta: Any) -> None:
        note(self.fn.__name__)
        with np.errstate(all="ignore"):  # of the thread that launches
            run(self, *args, **meta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", noted)
        yield


def assert_hooked(hooked: Sequence[Hooked], devices: Sequence[torch.device], least: int) -> None:
    """Each launch had its operands' device current; all `devices` were met, and no others."""
    assert [launch for launch in hooked if launch.current != launch.device] == []
    assert {launch.device for launch in hooked} == set(devices)
    assert len(hooked) >= least


def enable_peer_access(devices: list[torch.device]) -> bool:
    """Have two GPUs read each other's memory, as any copy between them does; False if they cannot.

    With it a kernel that is launched on the wrong GPU may well succeed. Simulated devices refuse.
    """
    if devices[0].type != "cuda":
        return False
    able = True
    for here, there in (devices, devices[::-1]):
        torch.zeros(1, device=here).to(there)
        able = able and torch.cuda.can_device_access_peer(here, there)
    return able
