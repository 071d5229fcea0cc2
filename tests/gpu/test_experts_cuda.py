"""Experts, recomputation, FusedAdam and the shim on one CUDA GPU, against the CPU."""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.integrations import transformer_engine
from quaver.nn import RNGStatesTracker, checkpoint

pytestmark = pytest.mark.gpu

SCRIPT = str(Path(__file__).parents[2] / "examples" / "te_script.py")


@pytest.fixture(autouse=True)
def _only_with_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_permuting_gives_the_cpus_bits(cuda, map_type: str, deterministic: bool) -> None:
    mask = torch.rand(64, 8) > 0.6
    routing_map = mask if map_type == "mask" else torch.randint(-1, 8, (64, 3))
    x, probs = torch.randn(64, 32), torch.rand(routing_map.shape)
    found = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for device in (torch.device("cpu"), cuda):
            ours, weights = x.to(device).requires_grad_(), probs.to(device).requires_grad_()
            rows, row_map = qv.moe_permute(ours, routing_map.to(device), 100, map_type)
            merged = qv.moe_unpermute(rows, row_map, weights)
            grads = torch.autograd.grad(merged.sum(), (ours, weights))
            found.append([t.cpu() for t in (rows, row_map, merged, *grads)])
    finally:
        torch.use_deterministic_algorithms(False)
    rows, row_map, merged, dx, dw = zip(*found, strict=True)
    for ours, theirs in (rows, row_map, dx):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(*merged)  # a fused multiply-add rounds once
    torch.testing.assert_close(*dw)


def test_cross_entropy(cuda) -> None:
    logits, target = torch.randn(40, 1000), torch.randint(0, 1000, (40,))
    ours = logits.to(cuda).requires_grad_()
    twin = logits.clone().requires_grad_()
    loss = qv.parallel_cross_entropy(ours, target.to(cuda), 0.1, True)
    expected = nn.functional.cross_entropy(twin, target, label_smoothing=0.1)
    torch.testing.assert_close(loss.cpu(), expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad.cpu(), twin.grad)


def test_grouped_linear_learns_the_cpus_scales(cuda) -> None:
    recipe = qv.recipe.DelayedScaling(amax_history_len=3)
    module = qv.GroupedLinear(3, 64, 96)
    twin = copy.deepcopy(module).to(cuda)
    x, splits = torch.randn(50, 64), [20, 0, 30]
    with qv.autocast(recipe=recipe):
        expected = module(x, splits)
    with qv.autocast(recipe=recipe):
        y = twin(x.to(cuda), splits)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-2, atol=1e-2)
    expected.sum().backward()
    y.sum().backward()
    for mode, state in module.recipe_states.items():
        assert torch.equal(state.scale, twin.recipe_states[mode].scale.cpu())
        assert twin.recipe_states[mode].device == cuda


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_numbers(cuda, reentrant: bool) -> None:
    tracker = RNGStatesTracker()
    tracker.add("experts", 3)
    masks = []

    def function(x: torch.Tensor) -> torch.Tensor:  # x is on the CPU; what draws is not
        y = nn.functional.dropout(x.to(cuda), 0.5)
        with tracker.fork("experts"):
            z = nn.functional.dropout(y, 0.5)
        masks.append((z.detach() != 0).cpu())
        return (z * y).cpu()

    x = torch.ones(256, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker)
    before = torch.cuda.get_rng_state(cuda)
    y.sum().backward()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad != 0, masks[0])
    assert torch.equal(torch.cuda.get_rng_state(cuda), before)


def test_adam_is_fused(cuda) -> None:
    module = nn.Linear(64, 64).bfloat16()
    twin = copy.deepcopy(module).to(cuda)
    for each in (module, twin):
        optimizer = qv.optim.FusedAdam(each.parameters(), lr=1e-2, master_weights=True)
        assert optimizer.inner.param_groups[0]["fused"]
        for step in range(3):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            optimizer.step()
    torch.testing.assert_close(twin.weight.cpu(), module.weight)


def test_a_script_for_transformer_engine_trains(cuda, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--steps", "150"])
    transformer_engine.enable()
    try:
        namespace = runpy.run_path(SCRIPT)
        loss = namespace["main"]()
        assert namespace["te"].Linear(16, 16).weight.device == cuda
    finally:
        transformer_engine.disable()
    assert loss < 2
