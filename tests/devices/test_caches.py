"""Caches and scratch memory: no two devices, and no two threads, share any."""

import threading
import time
from collections.abc import Hashable

import pytest
import torch

from quaver.devices import DeviceCache, scratch

CPU = torch.device("cpu")


def make_zeros(device: torch.device, key: Hashable) -> torch.Tensor:
    return torch.zeros(4, device=device)


def test_two_devices_never_share_an_entry(devices) -> None:
    cache: DeviceCache[torch.Tensor] = DeviceCache(make_zeros)
    first, second, again = (cache.get(devices[i]) for i in (0, 1, 0))
    assert first is again
    assert (first.device, second.device) == tuple(devices)
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1.0] * 4
    assert cache.get(CPU) is cache.get(CPU)
    assert cache.get(CPU).device == CPU


def test_the_current_device_does_not_matter(devices) -> None:
    cache: DeviceCache[torch.Tensor] = DeviceCache(make_zeros)
    with torch.accelerator.device_index(1):
        made = cache.get(devices[0])
    assert made.device == devices[0]
    assert cache.get(devices[0]) is made


def test_keys_are_apart_and_made_once(devices) -> None:
    calls = []

    def make(device: torch.device, key: Hashable) -> object:
        calls.append((device, key))
        return object()

    cache: DeviceCache[object] = DeviceCache(make)
    values = [cache.get(devices[0], key) for key in ("a", "b", "a", None)]
    assert values[0] is values[2]
    assert len({id(value) for value in values}) == 3
    assert calls == [(devices[0], "a"), (devices[0], "b"), (devices[0], None)]


def test_threads_that_ask_together_get_one_value() -> None:
    calls = []

    def make(device: torch.device, key: Hashable) -> object:
        calls.append(key)
        time.sleep(0.02)
        return object()

    cache: DeviceCache[object] = DeviceCache(make)
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(cache.get(CPU, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert len(set(map(id, got))) == 1


def test_a_device_without_an_index_is_refused(devices) -> None:
    """It would mean the current device."""
    vague = torch.device(devices[0].type)
    with pytest.raises(ValueError, match=f"index is needed.*{vague}"):
        DeviceCache(make_zeros).get(vague)
    with pytest.raises(ValueError, match="index is needed"):
        scratch(vague, "vague", 4, torch.float32)


def test_scratch_of_two_devices_is_never_shared(devices) -> None:
    with torch.accelerator.device_index(1):
        first, second, third = (scratch(devices[i], "shared", 8, torch.float32) for i in (0, 1, 0))
    assert (first.device, second.device) == tuple(devices)
    assert third.data_ptr() == first.data_ptr()
    first.fill_(1)
    second.fill_(2)
    assert third.tolist() == [1.0] * 8


def test_scratch_has_the_size_and_dtype_that_were_asked_for(devices) -> None:
    large = scratch(devices[0], "size", 100, torch.int32)
    assert (large.shape, large.dtype) == ((100,), torch.int32)
    small = scratch(devices[0], "size", 7, torch.int32)
    assert small.shape == (7,)
    assert small.data_ptr() == large.data_ptr()
    assert scratch(devices[0], "size", 200, torch.int32).numel() == 200
    assert scratch(devices[0], "size", 0, torch.int32).numel() == 0


def test_scratch_differs_by_name_and_dtype() -> None:
    pointers = {
        scratch(CPU, name, 16, dtype).data_ptr()
        for name in ("one", "two")
        for dtype in (torch.float32, torch.uint8)
    }
    assert len(pointers) == 4


def test_threads_do_not_share_scratch(devices) -> None:
    """The second asks when the first's is there already: no race decides what it gets."""
    mine = scratch(devices[0], "threads", 64, torch.float32).fill_(1)
    theirs: list[torch.Tensor] = []

    def work() -> None:
        theirs.append(scratch(devices[0], "threads", 64, torch.float32).fill_(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert mine.unique().tolist() == [1.0]
    assert theirs[0].unique().tolist() == [2.0]
    assert theirs[0].data_ptr() != mine.data_ptr()


def test_scratch_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        scratch(CPU, "inference", 8, torch.float32)
    buffer = scratch(CPU, "inference", 8, torch.float32)
    assert not buffer.is_inference()
    assert buffer.fill_(3).sum().item() == 24
