"""RNGStatesTracker: streams apart from the default one, on every device."""

import pytest
import torch

import quaver as qv
from quaver.devices import rng_states
from quaver.nn import RNGStatesTracker

Devices = list[torch.device]


def draw(devices: Devices) -> list[list[float]]:
    return [torch.rand(4, device=device).tolist() for device in (torch.device("cpu"), *devices)]


@pytest.fixture
def tracker() -> RNGStatesTracker:
    tracker = RNGStatesTracker()
    tracker.add("model-parallel-rng", 11)
    tracker.add("other", 12)
    return tracker


def test_a_stream_begins_with_its_seed_on_each_device_and_goes_on(
    tracker: RNGStatesTracker, devices: Devices
) -> None:
    with tracker.fork():
        first = draw(devices)
    with tracker.fork("other"):
        other = draw(devices)
    with tracker.fork():
        second = draw(devices)
    torch.manual_seed(11)
    assert first == draw(devices)
    assert second == draw(devices)
    torch.manual_seed(12)
    assert other == draw(devices)


def test_the_default_stream_does_not_notice(tracker: RNGStatesTracker, devices: Devices) -> None:
    before = rng_states()
    with tracker.fork():
        draw(devices)
    with pytest.raises(ZeroDivisionError), tracker.fork():
        draw(devices)[1 // 0]
    assert all(torch.equal(rng_states()[d], state) for d, state in before.items())


def test_states_can_be_taken_back(tracker: RNGStatesTracker, devices: Devices) -> None:
    with tracker.fork():
        draw(devices)
    states = tracker.get_states()
    with tracker.fork():
        first = draw(devices)
    another = RNGStatesTracker()
    another.set_states(states)
    with another.fork():
        assert draw(devices) == first
    tracker.set_states(states)
    with tracker.fork():
        assert draw(devices) == first


def test_mistakes_are_named(tracker: RNGStatesTracker) -> None:
    with pytest.raises(qv.QuaverError, match="'other' exists already"):
        tracker.add("other", 1)
    with pytest.raises(qv.QuaverError, match="seed 12"):
        tracker.add("third", 12)
    with pytest.raises(qv.QuaverError, match=r"no random number stream 'third' \(known: model"):
        tracker.fork("third").__enter__()
    with pytest.raises(qv.QuaverError, match="by device"):
        tracker.set_states({"other": torch.zeros(16)})
    tracker.reset()
    tracker.add("other", 12)
