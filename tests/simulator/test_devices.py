"""The current device, guards, streams, and what a device says of itself."""

import threading

import pytest
import torch


def test_an_op_on_two_devices_names_both() -> None:
    a, b = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and sim:1"):
        a + b
    with pytest.raises(RuntimeError, match=r"same device.*sim:1 and sim:0"):
        torch.cat([b, a])
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and sim:1"):
        a.add_(b)
    with pytest.raises(RuntimeError, match=r"same device.*sim:1 and cpu"):
        b @ torch.ones(2)


def test_a_cpu_scalar_and_cpu_indices_may_take_part() -> None:
    x = torch.arange(4.0, device="sim:1")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    x[torch.tensor([0])] = 5.0
    assert x.tolist() == [5, 1, 2, 3]


def test_a_cpu_scalar_may_not_be_written_to() -> None:
    scalar = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"same device.*sim:1 and cpu"):
        scalar.add_(torch.tensor(2.0, device="sim:1"))
    with pytest.raises(RuntimeError, match=r"same device.*sim:1 and cpu"):
        torch.linalg.vector_norm(torch.ones(2, device="sim:1"), out=scalar)
    assert scalar.item() == 1


def test_fill_takes_its_value_from_any_device() -> None:
    value = torch.tensor(3.0, device="sim:1")
    for device in ("cpu", "sim:0", "sim:1"):
        assert torch.ones(2, device=device).fill_(value).tolist() == [3, 3]


def test_an_op_runs_on_its_tensors_device_and_restores_the_current_one(
    placement: tuple[int, int],
) -> None:
    tensor, current = placement
    x = torch.ones(3, device=f"sim:{tensor}")
    assert (x + 1).device == torch.device("sim", tensor)
    assert torch.empty(1, device="sim").device == torch.device("sim", current)
    with pytest.raises(RuntimeError, match="size"):
        x + torch.ones(2, device=x.device)
    assert torch.sim.current_device() == current


def test_the_current_device_is_the_threads_own() -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(torch.sim.current_device())
        torch.sim.set_device(0)
        seen.append(torch.sim.current_device())

    with torch.sim.device(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert torch.sim.current_device() == 1
    assert seen == [0, 0]


@pytest.mark.parametrize("device", [1, "sim:1", torch.device("cpu")], ids=str)
def test_guard(device: int | str | torch.device) -> None:
    if device == torch.device("cpu"):
        with pytest.raises(ValueError, match="Expected a sim device, but got: cpu"):
            torch.sim.device(device)
        return
    with torch.sim.device(device):
        assert torch.sim.current_device() == 1
        with torch.sim.device(None), torch.sim.device("sim"), torch.sim.device(-1):
            assert torch.sim.current_device() == 1
    assert torch.sim.current_device() == 0


def test_guard_restores_after_an_error() -> None:
    with pytest.raises(KeyError), torch.sim.device(1):
        raise KeyError
    assert torch.sim.current_device() == 0


def test_device_of_follows_a_tensor() -> None:
    with torch.sim.device_of(torch.ones(1, device="sim:1")):
        assert torch.sim.current_device() == 1
        with torch.sim.device_of(torch.ones(1)):
            assert torch.sim.current_device() == 1


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 2: there are 2 devices"):
        torch.ones(1, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.sim.set_device(7)
    assert torch.sim.device_count() == 2


def test_torch_accelerator_is_the_simulator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.get_device_module("sim") is torch.sim
    with torch.accelerator.device_index(1):
        assert torch.sim.current_device() == 1


def test_streams_know_their_device() -> None:
    default = torch.sim.default_stream(1)
    assert default.device == torch.device("sim:1")
    assert torch.sim.current_stream(1) == default
    stream = torch.sim.Stream("sim:1")
    with torch.sim.stream(stream):
        assert torch.sim.current_device() == 1
        assert torch.sim.current_stream() == stream
    assert torch.sim.current_stream(1) == default
    with torch.sim.stream(None):
        assert torch.sim.current_device() == 0


def test_an_event_belongs_to_the_device_of_its_stream() -> None:
    event = torch.sim.Event()
    event.record(torch.sim.Stream(0))
    event.synchronize()
    assert event.query()
    with pytest.raises(RuntimeError, match=r"device 0 .*device 1"):
        event.record(torch.sim.Stream(1))


def test_a_device_claims_to_be_a_hopper() -> None:
    assert torch.sim.get_device_capability("sim:1") == (9, 0)
    properties = torch.sim.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("sim", 8 << 30)
    assert torch.sim.get_device_name() == "sim"
    assert torch.sim.is_available()
    assert torch.sim.is_bf16_supported()
