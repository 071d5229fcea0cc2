"""checkpoint: what is computed anew draws the same random numbers, wherever it drew them."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import quaver as qv
from quaver.devices import rng_states
from quaver.nn import RNGStatesTracker, checkpoint
from quaver.recipe import DelayedScaling
from tests.integration.helpers import assert_same, gradients, scaling

Devices = list[torch.device]
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


class Spread(nn.Module):
    """Dropout on the CPU and on two devices, between layers there; its input is on the first."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self.first = qv.Linear(16, 24, device=devices[0])
        self.second = qv.Linear(24, 16, device=devices[1])
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        x = self.drop(self.second(x.to(self.second.weight.device)))
        return self.drop(x.cpu())

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5)
        self.masks.append((x.detach() != 0).cpu())
        return x


def step(model: Spread, x: torch.Tensor, run) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    model.zero_grad()
    with qv.autocast(recipe=DelayedScaling(amax_history_len=3)):
        y = run(model, x)
    y.square().sum().backward()
    return {"y": y, "dx": x.grad, **gradients(model)}


@REENTRANT
def test_all_devices_draw_again_what_they_drew(devices: Devices, reentrant: bool) -> None:
    model = Spread(devices)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 16, device=devices[0])
    for _ in range(3):
        ours = step(model, x, partial(checkpoint, use_reentrant=reentrant))
        assert_same(ours, step(plain, x, lambda m, x: m(x)))
    assert_same(scaling(model), scaling(plain))
    # (the second run ends when the last tensor that is needed is there: within the last dropout)
    first, again = model.masks[:2], model.masks[3:5]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(mask.all() for mask in first)


@REENTRANT
def test_what_is_drawn_afterwards_does_not_repeat(devices: Devices, reentrant: bool) -> None:
    model = Spread(devices)
    x = torch.randn(8, 16, device=devices[0], requires_grad=True)
    y = checkpoint(model, x, use_reentrant=reentrant)
    before = rng_states()
    y.sum().backward()
    after = rng_states()
    assert before.keys() == after.keys() >= {torch.device("cpu"), *devices}
    assert all(torch.equal(after[d], state) for d, state in before.items())


@REENTRANT
def test_states_come_back_when_the_second_run_fails(devices: Devices, reentrant: bool) -> None:
    runs = []

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = nn.functional.dropout(x, 0.5).square()
        if len(runs) == 2:
            raise KeyError("broken")
        return y.square()

    x = torch.ones(64, device=devices[1], requires_grad=True)
    y = checkpoint(fails_later, x, use_reentrant=reentrant).sum()
    before = rng_states()
    with pytest.raises(KeyError, match="broken"):
        y.backward()
    assert len(runs) == 2
    assert all(torch.equal(rng_states()[d], state) for d, state in before.items())


def test_without_preserving_other_numbers_are_drawn(devices: Devices) -> None:
    model = Spread(devices)
    x = torch.randn(8, 16, device=devices[0], requires_grad=True)
    checkpoint(model, x, preserve_rng_state=False).sum().backward()
    assert not torch.equal(model.masks[0], model.masks[3])


@REENTRANT
def test_streams_of_a_tracker_repeat_and_go_on(devices: Devices, reentrant: bool) -> None:
    tracker = RNGStatesTracker()
    tracker.add("experts", 7)
    masks = []

    def forked(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("experts"):
            y = nn.functional.dropout(x, 0.5)
        masks.append((y.detach() != 0).cpu())
        return y * y

    x = torch.ones(64, device=devices[1], requires_grad=True)
    y = checkpoint(forked, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker)
    state = tracker.get_states()["experts"][devices[1]]
    y.sum().backward()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad.cpu() != 0, masks[0])
    assert torch.equal(tracker.get_states()["experts"][devices[1]], state)


def test_a_selective_policy_sees_the_operations_of_the_function_alone(devices: Devices) -> None:
    seen, runs = [], []

    def policy(context, op, *args, **kwargs):
        seen.append(str(op))
        saved = op == torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return nn.functional.dropout(x.sin().exp(), 0.5)

    x = torch.rand(32, device=devices[1], requires_grad=True)
    y = checkpoint(function, x, context_fn=partial(create_selective_checkpoint_contexts, policy))
    y.sum().backward()
    expected = torch.where(y != 0, 2 * x.sin().exp() * x.cos(), 0)
    torch.testing.assert_close(x.grad, expected)
    assert len(runs) == 2
    assert set(seen) == {"aten.sin.default", "aten.exp.default", "aten.native_dropout.default"}


def test_keyword_arguments_reach_the_function() -> None:
    def scaled(x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return (x * by).sin()

    x = torch.rand(4, requires_grad=True)
    by = torch.full((4,), 2.0, requires_grad=True)
    for reentrant in (False, True):
        x.grad = by.grad = None
        checkpoint(scaled, x, by=by, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(x.grad, 2 * (2 * x).cos().detach())
        torch.testing.assert_close(by.grad, (x * (2 * x).cos()).detach())


def test_options_of_the_other_kind_are_refused() -> None:
    x = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match="needs use_reentrant=False"):
        checkpoint(torch.sin, x, use_reentrant=True, debug=True)
    with pytest.raises(ValueError, match="needs use_reentrant=False"):
        checkpoint(
            torch.sin, x, use_reentrant=True, context_fn=lambda: (nullcontext(), nullcontext())
        )


def test_it_traces_under_compile() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x).sum()

    x = torch.rand(4, requires_grad=True)
    function(x).backward()
    torch.testing.assert_close(x.grad, x.cos().detach())
