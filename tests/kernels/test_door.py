"""The one door: operands' device, guard, errors, the log of launches, the choice of a version."""

import sys
import threading
from types import ModuleType

import pytest
import torch

from quaver.errors import DeviceMismatchError, QuaverError
from quaver.kernels import amax, cast, dequantize, scale_update, scaled_mm
from quaver.kernels.door import Kernel, launch, use_implementation
from quaver.testing import launches
from tests.samples import normal

E4M3 = torch.float8_e4m3fn
PLACEMENTS = [(tensor, current) for tensor in (0, 1) for current in (0, 1)]
placements = pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)


def index_of_current() -> int:
    return torch.accelerator.current_device_index()


def seen(x: torch.Tensor, others: list[torch.Tensor] | None) -> int:
    """A kernel that tells which device is current while it runs."""
    return index_of_current()


def broken(x: torch.Tensor) -> None:
    raise ArithmeticError(f"on {index_of_current()}")


@placements
def test_the_operands_device_is_current_inside_and_the_old_one_after(
    devices, tensor: int, current: int
) -> None:
    with torch.accelerator.device_index(current):
        x = torch.ones(2, device=devices[tensor])
        assert launch(Kernel(seen), x, None) == tensor
        assert index_of_current() == current


@placements
def test_the_current_device_comes_back_when_a_kernel_raises(
    devices, tensor: int, current: int
) -> None:
    with torch.accelerator.device_index(current):
        with pytest.raises(ArithmeticError, match=f"on {tensor}"):
            launch(Kernel(broken), torch.ones(2, device=devices[tensor]))
        assert index_of_current() == current


@placements
def test_every_kernel_runs_under_its_operands_device(devices, tensor: int, current: int) -> None:
    device = devices[tensor]
    with torch.accelerator.device_index(current), launches() as log:
        x, one, history = normal(4, 8, device=device), *torch.ones(2, 1, 1, device=device)
        data, _, scale_inv = cast(x, one, None, None, 0, E4M3, False)
        amax(x, history, 0)
        dequantize(data, scale_inv, torch.float32)
        scaled_mm(data, scale_inv, data, scale_inv, None, torch.float32)
        scale_update([history], [one.view(1)], [one.view(1).clone()], None, 448.0, "max")
    kernels = ["cast", "amax", "dequantize", "scaled_mm", "scale_update"]
    assert [entry.kernel for entry in log] == kernels
    assert {entry.device for entry in log} == {device}
    assert {entry.current for entry in log} == {device}


def test_operands_on_two_devices_are_refused_before_anything_runs(devices) -> None:
    x, scale = normal(2, 4, device=devices[0]), torch.ones(1, device=devices[1])
    history = torch.zeros(1, device=devices[0])
    with launches() as log, pytest.raises(DeviceMismatchError) as caught:
        cast(x, scale, history, None, 0, E4M3, False)
    message = str(caught.value)
    assert f"x is on {devices[0]}" in message
    assert f"scale is on {devices[1]}" in message
    assert "\n" not in message
    assert log == []
    assert history.item() == 0


def test_an_operand_inside_a_list_is_named_with_its_place(devices) -> None:
    here = [torch.ones(2, 1, device=devices[0]) for _ in range(2)]
    scales = [torch.ones(1, device=devices[0]), torch.ones(1, device=devices[1])]
    readies = [torch.ones(1, device=devices[0]) for _ in range(2)]
    expected = rf"histories\[0\] is on {devices[0]} and scales\[1\] is on {devices[1]}"
    with pytest.raises(DeviceMismatchError, match=expected):
        scale_update(here, scales, readies, None, 448.0, "max")
    mixed = rf"x is on {devices[0]} and others\[1\] is on cpu"
    others = [here[1], torch.ones(1)]
    with pytest.raises(DeviceMismatchError, match=mixed):
        launch(Kernel(seen), here[0], others)


def test_launches_are_logged_on_the_cpu_too() -> None:
    cpu = torch.device("cpu")
    with launches() as log:
        amax(torch.ones(3), torch.zeros(1), 0)
    assert log == [("amax", cpu, cpu)]
    amax(torch.ones(3), torch.zeros(1), 0)
    assert len(log) == 1, "the log goes on after its block"


def test_logs_nest_and_each_sees_what_ran_while_it_was_open() -> None:
    with launches() as outer:
        amax(torch.ones(3), torch.zeros(1), 0)
        refused = pytest.raises(ArithmeticError)
        with refused, launches() as inner:
            dequantize(torch.ones(3).to(E4M3), torch.ones(1), torch.float32)
            launch(Kernel(broken), torch.ones(1))
        amax(torch.ones(3), torch.zeros(1), 0)
    assert [entry.kernel for entry in inner] == ["dequantize", "broken"]
    assert [entry.kernel for entry in outer] == ["amax", "dequantize", "broken", "amax"]


def test_launches_of_other_threads_are_logged_with_their_current_device(devices) -> None:
    def work(device: torch.device) -> None:
        for _ in range(20):
            amax(torch.ones(3, device=device), torch.zeros(1, device=device), 0)

    with launches() as log:
        threads = [threading.Thread(target=work, args=(device,)) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(log) == 40
    assert all(entry.current == entry.device for entry in log)
    assert {entry.device for entry in log} == set(devices)


def name(x: torch.Tensor) -> str:
    return "reference"


@pytest.fixture
def two_versions(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel with a Triton version, of which nothing is compiled."""
    module = ModuleType("versions")
    module.name = lambda x: "triton"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "versions", module)
    return Kernel(name, triton="versions")


def test_triton_runs_where_it_compiles_and_nowhere_else(
    devices, two_versions: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices[1]
    monkeypatch.setattr("quaver.kernels.door.runs_triton", lambda kind: kind == device.type)
    assert launch(two_versions, torch.ones(1, device=device)) == "triton"
    assert launch(two_versions, torch.ones(1)) == "reference"
    assert launch(two_versions, torch.ones(1, device="meta")) == "reference"


def test_an_implementation_that_is_named_runs_everywhere_in_the_block(two_versions) -> None:
    x = torch.ones(1)
    with use_implementation("triton"):
        assert launch(two_versions, x) == "triton"
        with use_implementation("reference"):
            assert launch(two_versions, x) == "reference"
        assert launch(two_versions, x) == "triton"
        assert launch(Kernel(name), x) == "reference"  # which has no other version
    assert launch(two_versions, x) == "reference"


def test_an_unknown_implementation_is_refused_and_changes_nothing(two_versions) -> None:
    with (
        pytest.raises(QuaverError, match='must be "reference" or "triton", not \'fast\''),
        use_implementation("fast"),
    ):
        pass
    assert launch(two_versions, torch.ones(1)) == "reference"


@pytest.mark.parametrize("where", ["cpu", "accelerator"])
def test_autocast_of_torch_does_not_reach_into_a_kernel(devices, where: str) -> None:
    """A product inside would be rounded to bfloat16 on the way."""
    device = devices[1] if where == "accelerator" else torch.device("cpu")
    x, one = normal(4, 8, device=device), torch.ones(1, device=device)
    data, _, scale_inv = cast(x, one, None, None, 0, E4M3, False)
    expected = scaled_mm(data, scale_inv, data, scale_inv, None, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = scaled_mm(data, scale_inv, data, scale_inv, None, torch.float32)
        assert torch.is_autocast_enabled(device.type)
        assert (x @ x.t()).dtype == torch.bfloat16
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_without_the_guard_a_simulated_device_fails_as_a_real_one(
    devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the tests above mean something: the launch check looks at the current device."""
    if devices[0].type != "sim":
        pytest.skip("a real device may crash the process")
    monkeypatch.setattr("quaver.kernels.door.pin", lambda device: -1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        amax(torch.ones(3, device=devices[1]), torch.zeros(1, device=devices[1]), 0)
