"""What is made for one device is never used on another: two devices of different properties.

The first claims to be an sm_80, the second an sm_90. Compiled kernels are stood for by objects that
know the device that was current when they were compiled, and that refuse to run for another.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quaver as qv
from quaver.conversion import gain
from quaver.conversion.gain import Rates, predicted_gain
from quaver.devices import (
    DeviceCache,
    capability,
    current_device,
    fp8_gemm_path,
    has_fp8_block_gemm,
    has_fp8_gemm,
    on_device,
)
from quaver.formats import E4M3

pytest.importorskip("triton")

from quaver.kernels.common import triton_cast, triton_fused, triton_launch
from quaver.kernels.common.triton_launch import Prepared, launch_grid
from quaver.kernels.scale_update import triton as scale_update

Devices = list[torch.device]

CHIPS = {0: (8, 0), 1: (9, 0)}
RATES = {
    index: Rates(
        high_precision=7e14, fp8=fp8, bandwidth=4e12, high_precision_host=1e-4, fp8_host=1e-4
    )
    for index, fp8 in ((0, 8e14), (1, 13e14))
}

found = sys.modules["quaver.devices.capability"]  # the package's name is taken by the function


def claimed(device: torch.device) -> tuple[int, int]:
    return CHIPS[torch.device(device).index]


@pytest.fixture
def chips(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """`devices`, which claim to be different chips; nothing is known of them yet."""
    for module in (torch.cuda, torch.get_device_module(devices[0].type)):
        monkeypatch.setattr(module, "get_device_capability", claimed)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(found, "_capabilities", DeviceCache(found._read_capability))
    monkeypatch.setattr(found, "_products", {})
    return devices


# ---- what a device can do


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
def test_what_one_gpu_can_do_is_not_said_of_another(chips: Devices, order: tuple[int, ...]) -> None:
    del chips
    for index in order:
        gpu = torch.device("cuda", index)
        assert capability(gpu) == CHIPS[index]
        assert has_fp8_gemm(gpu) == has_fp8_block_gemm(gpu) == (index == 1)
        assert fp8_gemm_path(gpu).startswith("cuBLASLt on cuda:1" if index else "emulated on cuda")


def test_rates_are_measured_on_each_device_once(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(device: torch.device) -> Rates:
        measured.append(device)
        return RATES[device.index]

    monkeypatch.setattr(gain, "measure_rates", measure)
    monkeypatch.setattr(gain, "_rates", DeviceCache(gain._measure))
    monkeypatch.setattr(gain, "has_fp8_gemm", lambda device: True)
    layers = [qv.Linear(4096, 4096, device=torch.device("meta")) for _ in devices]
    for layer, device in zip(layers, devices, strict=True):
        layer.to_empty(device=device)
    for _ in range(2):
        gains = [predicted_gain(layer, 4096) for layer in layers]
        assert gains == [RATES[i].gain(4096, 4096, 4096) for i in range(2)]
    assert measured == devices
    assert gains[0] != gains[1]


# ---- launchers


class Compiled:
    """A kernel that Triton compiled: for one device, and it runs under that device only."""

    function = packed_metadata = None

    def __init__(self, device: torch.device, native: bool | None) -> None:
        self.device = device
        self.native = native
        self.streams: list[Any] = []
        self.hooked: list[torch.device] = []

    def launch_metadata(self, grid: Any, stream: Any, *args: Any) -> dict[str, Any]:
        return {"name": "fake", "stream": stream}

    def run(self, *args: Any) -> None:
        stream, said, enter = args[3], args[6], args[7]
        if enter is not None:  # as Triton's launcher in C does
            enter(said)
        assert current_device(self.device.type) == self.device
        assert stream == f"stream of {self.device.index}"
        self.streams.append(stream)


class Triton:
    """Stands for Triton: compiles for the device that is current, and keeps what it compiled."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.compiled: list[Compiled] = []

    def compile(self, native: bool | None = None) -> Compiled:
        self.compiled.append(Compiled(current_device(self.device_type), native))
        return self.compiled[-1]

    def launch_grid(self, fn: Any, grid: Any, *args: Any, **meta: Any) -> Prepared:
        index = next(arg for arg in args if isinstance(arg, torch.Tensor)).get_device()
        return Prepared(self.compile(meta.get("NATIVE")), index, ())


class JitFunction:
    """Stands for a function decorated with `triton.jit`, of one tensor and a constexpr."""

    def __init__(self, compile: Callable[[], Compiled]) -> None:
        self.compile = compile
        names = (("x", False), ("SIZE", True))
        self.params = [
            SimpleNamespace(name=name, is_constexpr=fixed, do_not_specialize=False)
            for name, fixed in names
        ]

    def __getitem__(self, grid: Any) -> Callable[..., Compiled]:
        return lambda *args, **meta: self.compile()


@pytest.fixture
def compiler(chips: Devices, monkeypatch: pytest.MonkeyPatch) -> Triton:
    """Triton stood for everywhere, and no launcher prepared yet."""
    stand_in = Triton(chips[0].type)
    monkeypatch.setattr(triton_launch, "raw_stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(triton_launch, "_prepared", {})
    for module in (triton_cast, triton_fused, scale_update):
        monkeypatch.setattr(module, "launch_grid", stand_in.launch_grid)
        monkeypatch.setattr(module, "_launches", {})
    monkeypatch.setattr(triton_fused, "is_interpreted", lambda fn: False)
    monkeypatch.setattr(scale_update, "_tables", DeviceCache(scale_update._no_tables))
    return stand_in


def assert_one_each(compiler: Triton, devices: Devices, runs: int) -> None:
    """One was compiled for each device, and ran there at all launches but the first."""
    assert [kernel.device for kernel in compiler.compiled] == devices
    assert [len(kernel.streams) for kernel in compiler.compiled] == [runs] * 2


def in_turn(devices: Devices, launch: Callable[[torch.device], object]) -> None:
    """Launch three times on each device, which the door makes current."""
    for _ in range(3):
        for device in devices:
            with on_device(device):
                launch(device)


def test_launchers_are_prepared_for_each_device(
    compiler: Triton, chips: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "JITFunction", JitFunction)
    fn = JitFunction(compiler.compile)
    in_turn(chips, lambda device: launch_grid(fn, (1,), torch.zeros(16, device=device), SIZE=16))
    assert_one_each(compiler, chips, 2)


def test_a_prepared_launcher_calls_tritons_hook(
    compiler: Triton, chips: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests on two GPUs see by it under which device each kernel is launched."""
    monkeypatch.setattr(triton_launch, "JITFunction", JitFunction)
    fn = JitFunction(compiler.compile)
    seen = []

    def hook(metadata: dict[str, Any]) -> None:
        seen.append((metadata["name"], current_device(chips[0].type)))

    triton_launch._hooks.launch_enter_hook.add(hook)
    try:
        in_turn(
            chips, lambda device: launch_grid(fn, (1,), torch.zeros(16, device=device), SIZE=16)
        )
    finally:
        triton_launch._hooks.launch_enter_hook.remove(hook)
    assert seen == [("fake", device) for device in chips * 2]  # all but those that compile


def test_casts_are_compiled_for_each_chip(compiler: Triton, chips: Devices) -> None:
    scaling = [
        triton_cast.Scaling(torch.ones(1, device=device), None, None, None, 0, 448.0)
        for device in chips
    ]

    def launch(device: torch.device) -> None:
        x = torch.zeros(32, 32, device=device)
        results = triton_cast.cast_matrix(x, x.shape, E4M3, True, scaling[device.index])
        assert {tensor.device for tensor in results} == {device}

    in_turn(chips, launch)
    assert_one_each(compiler, chips, 2)
    assert [kernel.native for kernel in compiler.compiled] == [False, True]


@pytest.mark.parametrize("alike", [False, True])
def test_fused_casts_are_compiled_for_each_device(
    compiler: Triton, chips: Devices, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both are of one kind, and nothing but the device tells them apart."""
    if alike:
        monkeypatch.setattr(triton_fused, "capability", lambda device: (9, 0))

    def launch(device: torch.device) -> None:
        scale = torch.ones(1, device=device)
        cast = triton_fused.casting(
            launch, (16, 16), scale, None, None, 0, E4M3, True, 0, None
        )  # any function does for a kernel
        tensors = tuple(t for t in cast.target if t is not None)
        assert {tensor.device for tensor in tensors} == {device}
        phases = triton_fused.phases_of(cast)
        triton_fused.launch_phases(launch, (1,), tensors, cast.numbers, phases, cast.meta)

    in_turn(chips, launch)
    assert_one_each(compiler, chips, 2)
    assert [kernel.native for kernel in compiler.compiled] == [alike, True]


def test_scale_updates_have_launchers_and_tables_for_each_device(
    compiler: Triton, chips: Devices
) -> None:
    states = {
        device: [[torch.zeros(shape, device=device)] for shape in ((4, 3), (3,), (3,))]
        for device in chips
    }

    def launch(device: torch.device) -> None:
        scale_update.scale_update(*states[device], None, 448.0, "max")

    in_turn(chips, launch)
    assert_one_each(compiler, chips, 2)
    for device in chips:
        (table,) = scale_update._tables.get(device).values()
        assert table.device == device
        assert table[0, :3].tolist() == [part[0].data_ptr() for part in states[device]]
