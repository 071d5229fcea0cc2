"""What --devices takes."""

import pytest
import torch

from quaver.cli.demo import devices
from quaver.cli.errors import CommandError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "choice", "names"),
    [
        (0, "auto", ["sim:0", "sim:1"]),
        (1, "auto", ["cuda:0", "cpu"]),
        (2, "auto", ["cuda:0", "cuda:1"]),
        (8, "auto", ["cuda:0", "cuda:1"]),
        (0, "cpu", ["cpu"]),
        (0, "cpu,cpu:0", ["cpu"]),
        (0, "sim", ["sim:0", "sim:1"]),
        (0, "sim:1, sim:0", ["sim:1", "sim:0"]),
        (0, "sim:3,cpu", ["sim:3", "cpu"]),
        (1, "cuda", ["cuda:0"]),
        (4, "cuda", ["cuda:0", "cuda:1"]),
        (4, "cuda:2,cuda:0,cuda:3", ["cuda:2", "cuda:0", "cuda:3"]),
    ],
)
def test_choices(gpus: int, choice: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, gpus)
    assert devices.find_devices(choice) == names


@pytest.mark.parametrize(
    ("gpus", "choice", "message"),
    [
        (0, "gpu", "unknown device 'gpu'; --devices takes auto, cpu, cuda, sim, or a list"),
        (0, "sim,tpu:0", "unknown device 'tpu:0'"),
        (0, "", "unknown device ''"),
        (0, "sim:x", "unknown device 'sim:x'"),
        (0, "cpu:1", "unknown device 'cpu:1': 1 of cpu here"),
        (0, "cuda", "unknown device 'cuda': 0 of cuda here"),
        (1, "cuda:0,cuda:1", "unknown device 'cuda:1': 1 of cuda here"),
        (0, "sim:99", "unknown device 'sim:99': 16 of sim here"),
        (1, "cuda:0,sim:0", "cuda and sim cannot share a process"),
    ],
)
def test_unknown_devices(
    gpus: int, choice: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    with pytest.raises(CommandError, match=message):
        devices.find_devices(choice)


def test_simulated_devices_are_started() -> None:
    assert devices.start_devices(["cpu"]) == [torch.device("cpu")]
    (one,) = devices.start_devices(["sim:1"])
    assert (one.type, one.index) == ("sim", 1)
    assert torch.zeros(2, device=one).device == one


def test_the_peak_counts_a_devices_own_bytes() -> None:
    first, second = devices.start_devices(["sim:0", "sim:1"])
    for device in (first, second):
        devices.reset_peak(device)
    before = devices.peak_bytes(first), devices.peak_bytes(second)
    torch.zeros(1 << 20, dtype=torch.uint8, device=second)
    assert devices.peak_bytes(first) == before[0]
    grown = devices.peak_bytes(second)
    assert grown is not None
    assert before[1] is not None
    assert grown >= before[1] + (1 << 20)
    devices.reset_peak(second)
    assert devices.peak_bytes(second) == before[1]


def test_the_cpu_counts_nothing() -> None:
    devices.reset_peak(torch.device("cpu"))
    assert devices.peak_bytes(torch.device("cpu")) is None
