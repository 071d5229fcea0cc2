"""What a device can do is asked of that device, and once."""

import sys

import pytest
import torch

import quaver as qv
from quaver.devices import DeviceCache, default_device, fp8_gemm_path
from quaver.devices import capability as capability_of

tested = sys.modules["quaver.devices.capability"]  # the package's name is taken by the function


@pytest.fixture
def two_chips(devices, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Device 0 claims to be an sm_80, device 1 an sm_100; each answers once."""
    asked = []

    def claims(device: torch.device) -> tuple[int, int]:
        assert device not in asked, "asked twice"
        asked.append(device)
        return {0: (8, 0), 1: (10, 0)}[torch.device(device).index]

    module = torch.get_device_module(devices[0].type)
    monkeypatch.setattr(module, "get_device_capability", claims)
    monkeypatch.setattr(tested, "_capabilities", DeviceCache(tested._read_capability))
    return devices


def test_each_device_has_its_own_capability_whichever_is_current(two_chips) -> None:
    first, second = two_chips
    for current in (0, 1, 0):
        with torch.accelerator.device_index(current):
            assert capability_of(first) == (8, 0)
            assert capability_of(second) == (10, 0)


def test_the_gemm_path_names_device_and_chip(two_chips) -> None:
    first, second = two_chips
    assert str(first) in fp8_gemm_path(first)
    assert "sm_80" in fp8_gemm_path(first)
    assert str(second) in fp8_gemm_path(second)
    assert "sm_100" in fp8_gemm_path(second)


def test_the_cpu_has_no_chip() -> None:
    assert capability_of(torch.device("cpu")) == (0, 0)
    assert capability_of(torch.device("meta")) == (0, 0)
    path = fp8_gemm_path(torch.device("cpu"))
    assert "emulated on cpu" in path
    assert "sm_" not in path


def test_the_default_device_is_the_current_accelerator(devices) -> None:
    with torch.accelerator.device_index(1):
        assert default_device() == devices[1]
    assert default_device() == devices[0]


def test_fp8_is_available_everywhere_and_says_how(devices) -> None:
    assert qv.is_fp8_available() is True
    with torch.accelerator.device_index(1):
        available, path = qv.is_fp8_available(return_reason=True)
    assert available is True
    assert path == fp8_gemm_path(devices[1])
