"""The guard: which device is current inside, and that the old one comes back."""

import threading

import pytest
import torch

from quaver.devices import current_device, guard, has_current, launch_check, on_device, pin, unpin

PLACEMENTS = [(tensor, current) for tensor in (0, 1) for current in (0, 1)]
placements = pytest.mark.parametrize(("wanted", "current"), PLACEMENTS)
CPU, META = torch.device("cpu"), torch.device("meta")


def index_of_current() -> int:
    return torch.accelerator.current_device_index()


@placements
def test_on_device_sets_and_restores(devices, wanted: int, current: int) -> None:
    with torch.accelerator.device_index(current):
        with on_device(devices[wanted]):
            assert index_of_current() == wanted
            assert current_device(devices[0].type) == devices[wanted]
        assert index_of_current() == current


@placements
def test_the_old_device_comes_back_on_an_error(devices, wanted: int, current: int) -> None:
    with torch.accelerator.device_index(current):
        with pytest.raises(KeyError), on_device(devices[wanted]):
            raise KeyError
        assert index_of_current() == current


@placements
def test_pin_says_what_to_restore(devices, wanted: int, current: int) -> None:
    with torch.accelerator.device_index(current):
        previous = pin(devices[wanted])
        assert previous == (-1 if wanted == current else current)
        assert index_of_current() == wanted
        unpin(devices[wanted], previous)
        assert index_of_current() == current


def test_nothing_is_exchanged_when_the_device_is_current_already(
    devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    kind = devices[0].type
    with on_device(devices[1]):
        real = guard._backend(kind)
        monkeypatch.setitem(guard._backends, kind, real._replace(exchange=asked.append))
        with on_device(devices[1]):
            assert index_of_current() == 1
        assert asked == []
        monkeypatch.setitem(guard._backends, kind, real)


def test_guards_nest(devices) -> None:
    with on_device(devices[1]):
        with on_device(devices[0]):
            with on_device(devices[1]):
                assert index_of_current() == 1
            assert index_of_current() == 0
        assert index_of_current() == 1
    assert index_of_current() == 0


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_the_cpu_and_meta_have_no_current_device(devices, device: torch.device) -> None:
    assert not has_current(device)
    assert pin(device) == -1
    with on_device(devices[1]), on_device(device):
        assert index_of_current() == 1
    assert current_device(device.type) == device
    assert launch_check(device.type) is None


def test_an_accelerator_has_one(devices) -> None:
    assert has_current(devices[0])


def test_a_backend_without_an_exchange_works_in_two_calls(
    devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        """A device module with the two functions that every backend has."""

        @staticmethod
        def current_device() -> int:
            return index_of_current()

        @staticmethod
        def set_device(index: int) -> None:
            torch.accelerator.set_device_index(index)

    monkeypatch.delitem(guard._backends, devices[0].type, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Plain)
    with on_device(devices[1]):
        assert index_of_current() == 1
    assert index_of_current() == 0
    monkeypatch.delitem(guard._backends, devices[0].type)


def test_each_thread_has_its_own_current_device(devices) -> None:
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        for _ in range(50):
            with on_device(devices[index]):
                barrier.wait(10)
                seen[index].add(index_of_current())

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: {0}, 1: {1}}
    assert index_of_current() == 0


def test_on_device_traces_under_compile(devices) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        with on_device(x.device):
            return x * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    result = compiled(torch.ones(3, device=devices[1]))
    assert result.device == devices[1]
    assert result.tolist() == [2.0, 2.0, 2.0]
    assert index_of_current() == 0
