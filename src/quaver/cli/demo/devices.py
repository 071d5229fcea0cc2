"""Which devices the demo runs on: what ``--devices`` says, or the best that the machine has."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from quaver.cli.errors import CommandError
from quaver.testing import simulated_devices

_NAME = re.compile(r"(cpu|cuda|sim)(?::(\d+))?")
_MOST_SIMULATED = 16
_REMEDY = "--devices takes auto, cpu, cuda, sim, or a list such as cuda:0,cpu or sim:0,sim:1"


def find_devices(choice: str) -> list[str]:
    """The names of the devices for a choice, such as "cuda:0"; nothing is started.

    ``auto``: two GPUs when there are two, a GPU and the CPU when there is one, else two simulated
    accelerators. Raises CommandError for a device that is not there.
    """
    names = list(dict.fromkeys(_auto() if choice.strip() == "auto" else _listed(choice)))
    if {"cuda", "sim"} <= {name.split(":")[0] for name in names}:
        raise CommandError("cuda and sim cannot share a process; name devices of one of them")
    return names


def start_devices(names: Iterable[str]) -> list[torch.device]:
    """The devices by their names; loads the simulator when one of them is simulated.

    Raises SimulatorUnavailableError when it cannot be built.
    """
    names = list(names)
    simulated = [int(name.split(":")[1]) for name in names if name.startswith("sim")]
    if simulated:
        simulated_devices(max(2, max(simulated) + 1))
    return [torch.device(name) for name in names]


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes allocated on ``device`` since the last reset; None where nobody counts."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Let the peak of ``device`` start again from what it holds now."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def _auto() -> list[str]:
    gpus = torch.cuda.device_count()
    if gpus >= 2:
        return _indexed("cuda", 2)
    return [*_indexed("cuda", 1), "cpu"] if gpus == 1 else _indexed("sim", 2)


def _indexed(kind: str, count: int) -> list[str]:
    return [f"{kind}:{index}" for index in range(count)]


def _listed(choice: str) -> list[str]:
    return [device for name in choice.split(",") for device in _named(name.strip())]


def _named(name: str) -> list[str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise CommandError(f"unknown device {name!r}; {_REMEDY}")
    kind, index = match[1], None if match[2] is None else int(match[2])
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "sim": _MOST_SIMULATED}[kind]
    if (index or 0) >= present:
        raise CommandError(f"unknown device {name!r}: {present} of {kind} here; {_REMEDY}")
    if kind == "cpu":
        return [kind]
    return _indexed(kind, min(2, present)) if index is None else [f"{kind}:{index}"]
