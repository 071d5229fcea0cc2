"""What a region remembers of the states that were used in it."""

import torch

from quaver.recipe import DelayedScaling
from quaver.scaling.state import RecipeState
from quaver.scaling.used import CALIBRATED, RECORDED, SEEN, Used


def state(device="cpu") -> RecipeState:
    return RecipeState.create(DelayedScaling(), mode="forward", num_quantizers=3, device=device)


def test_states_stay_in_the_order_of_their_first_use() -> None:
    used, states = Used(), [state() for _ in range(4)]
    for i in (2, 0, 3, 0, 2, 1):
        used.add(states[i], RECORDED)
    assert list(used.states) == [states[i] for i in (2, 0, 3, 1)]


def test_the_most_that_was_recorded_counts() -> None:
    used, a, b, c = Used(), state(), state(), state()
    for each, what in [(a, SEEN), (b, CALIBRATED), (c, RECORDED), (a, RECORDED), (b, SEEN)]:
        used.add(each, what)
    assert used.at_least(SEEN) == [a, b, c]
    assert used.at_least(RECORDED) == [a, b, c]
    assert used.at_least(CALIBRATED) == [b]
    used = Used()
    used.add(a, SEEN)
    assert used.at_least(RECORDED) == []


def test_devices_are_known_without_a_walk(devices) -> None:
    used = Used()
    for index in (1, 1, 0, 1):
        used.add(state(devices[index]), SEEN)
    assert list(used.devices) == [devices[1], devices[0]]
    used.clear()
    assert (used.states, used.devices) == ({}, {})


def test_equal_states_are_not_one() -> None:
    used = Used()
    used.add(state(), SEEN)
    used.add(state(), SEEN)
    assert len(used.states) == 2
    assert torch.equal(*(s.scale for s in used.states))
