"""The update of scales and histories, against a slow one in NumPy and against hand-made cases."""

import numpy as np
import pytest
import torch

from quaver.errors import RecipeError
from quaver.kernels import custom_scale_update, scale_update
from quaver.kernels.scale_update.reference import next_scale
from tests.kernels.numerics import FLOAT32_MAX
from tests.kernels.slow_update import updated

LIMITS = [448.0, 57344.0, 448.0 / 2, 57344.0 * 8]  # the last two: margins 1 and -3


def random_amaxes(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Amaxes of every size, with zeros (unseen), inf, and ones whose scale overflows."""
    values = np.exp2(generator.uniform(-40, 40, shape)).astype(np.float32)
    kind = generator.integers(0, 8, shape)
    values[kind == 0] = 0.0
    values[kind == 1] = np.inf
    values[kind == 2] = 1.0e-41
    return values


class States:
    """Some states of random sizes, and the same values side by side in NumPy."""

    def __init__(self, seed: int, length: int) -> None:
        generator = np.random.default_rng(seed)
        self.sizes = [3, 2, 6, 3]
        n = sum(self.sizes)
        self.history = random_amaxes(generator, length, n)
        self.scale = np.exp2(generator.uniform(-20, 20, n)).astype(np.float32)
        self.ready = generator.integers(0, 2, n).astype(np.float32)
        self.tensors = [
            [part.clone() for part in torch.from_numpy(array).split(self.sizes, array.ndim - 1)]
            for array in (self.history, self.scale, self.ready)
        ]

    def accumulate(self, row: np.ndarray) -> None:
        """Write a step's amaxes into row 0."""
        self.history[0] = row
        for history, part in zip(self.tensors[0], torch.tensor(row).split(self.sizes), strict=True):
            history[0] = part

    def check(self) -> None:
        for array, parts in zip((self.history, self.scale, self.ready), self.tensors, strict=True):
            np.testing.assert_array_equal(torch.cat(parts, array.ndim - 1).numpy(), array)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("reduced", [False, True])
def test_random_histories(length: int, algorithm: str, limit: float, reduced: bool) -> None:
    for seed in range(12):
        states = States(seed, length)
        generator = np.random.default_rng(1000 + seed)
        for _ in range(6):
            states.accumulate(random_amaxes(generator, sum(states.sizes)))
            amaxes = random_amaxes(generator, sum(states.sizes)) if reduced else None
            scale_update(
                *states.tensors,
                None if amaxes is None else torch.from_numpy(amaxes),
                limit,
                algorithm,
            )
            states.history, states.scale, states.ready = updated(
                states.history, states.scale, states.ready, amaxes, limit, algorithm
            )
            states.check()


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_random_histories_with_a_function_of_the_user(length: int, reduced: bool) -> None:
    """It sees the history before the roll, the newest in row 0."""

    def choose(history: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        assert torch.equal(history[0], last)
        return torch.maximum(history[0], history[-1] * 0.5)

    def slow(history: np.ndarray) -> np.float32:
        return max(history[0], history[-1] * np.float32(0.5))

    for seed in range(12):
        states = States(seed, length)
        amaxes = random_amaxes(np.random.default_rng(seed), sum(states.sizes)) if reduced else None
        parts = [None] * 4 if amaxes is None else torch.from_numpy(amaxes).split(states.sizes)
        for history, scale, ready, part in zip(*states.tensors, parts, strict=True):
            custom_scale_update(
                history, scale, ready, part, choose, lambda a, s: next_scale(a, s, 448.0)
            )
        states.history, states.scale, states.ready = updated(
            states.history, states.scale, states.ready, amaxes, 448.0, slow
        )
        states.check()


def update_one(history: list[float], scale: float = 1.0, algorithm: str = "max"):
    """One slot: its history, scale and readiness after an update."""
    column = torch.tensor(history).unsqueeze(1)
    scales, ready = torch.tensor([scale]), torch.zeros(1)
    scale_update([column], [scales], [ready], None, 448.0, algorithm)
    return column.flatten().tolist(), scales.item(), ready.item()


def test_the_newest_sits_at_the_end_and_the_first_row_is_free() -> None:
    assert update_one([4.0, 1.0, 2.0, 3.0]) == ([0.0, 2.0, 3.0, 4.0], 112.0, 1.0)
    assert update_one([4.0]) == ([0.0], 112.0, 1.0)


def test_a_slot_that_was_not_seen_stays_as_it_is() -> None:
    assert update_one([0.0, 1.0, 2.0], scale=9.0) == ([0.0, 1.0, 2.0], 9.0, 0.0)


def test_the_oldest_row_still_counts_in_the_update_that_drops_it() -> None:
    assert update_one([1.0, 8.0, 2.0])[1] == 56.0
    assert update_one([0.0, 2.0, 1.0])[1] == 1.0


def test_an_infinity_in_the_window_does_not_freeze_the_scale() -> None:
    history, scale, _ = update_one([torch.inf, 2.0, 4.0], scale=9.0)
    assert history == [0.0, 4.0, torch.inf]
    assert scale == 112.0
    assert update_one([2.0, torch.inf, torch.inf], scale=9.0)[1] == 224.0
    assert update_one([torch.inf, 0.0, 0.0], scale=9.0)[1:] == (9.0, 0.0)
    assert update_one([torch.inf, 2.0, 2.0], scale=9.0, algorithm="most_recent")[1] == 9.0


def test_an_overflowing_scale_is_the_largest_float() -> None:
    assert update_one([1.0e-40])[1] == FLOAT32_MAX


def test_a_reduced_amax_of_zero_means_the_own_one() -> None:
    history, scale, ready = torch.tensor([[4.0, 0.0, 2.0]]), torch.ones(3), torch.zeros(3)
    reduced = torch.tensor([0.0, 8.0, 1.0])
    scale_update([history], [scale], [ready], reduced, 448.0, "most_recent")
    assert scale.tolist() == [112.0, 56.0, 448.0]
    assert ready.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("which", ["choose", "rule"])
@pytest.mark.parametrize(
    "make", [lambda x: x[:2], lambda x: x.max(), lambda x: x[None], lambda x: 2.0], ids=range(4)
)
def test_what_a_function_of_the_user_must_return_is_said_before_anything_is_written(
    make, which: str
) -> None:
    tensors = torch.tensor([[4.0, 2.0, 1.0], [1.0, 1.0, 1.0]]), torch.ones(3), torch.zeros(3)
    before = [tensor.clone() for tensor in tensors]
    choose = (lambda h, last: make(last)) if which == "choose" else lambda h, last: last
    rule = (lambda a, s: make(s)) if which == "rule" else lambda a, s: s
    name = "amax_compute_algo" if which == "choose" else "scaling_factor_compute_algo"
    with pytest.raises(RecipeError, match=rf"{name} must return a tensor of shape \(3,\), not"):
        custom_scale_update(*tensors, None, choose, rule)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


def test_a_scale_of_the_user_that_is_none_leaves_the_old_one() -> None:
    history, scale, ready = torch.ones(2, 4), torch.full((4,), 3.0), torch.zeros(4)
    proposed = torch.tensor([0.0, torch.inf, torch.nan, 7.0])
    custom_scale_update(history, scale, ready, None, lambda h, last: last, lambda a, s: proposed)
    assert scale.tolist() == [3.0, 3.0, 3.0, 7.0]
    assert history[:, 0].tolist() == [0.0, 1.0]
