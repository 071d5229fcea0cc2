"""Activation recompute under every recipe: what is random in the backward is repeated, too."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.recipe import NVFP4BlockScaling
from tests.integration.helpers import assert_same, gradients, scaling
from tests.integration.recipes import RECIPES

NVFP4 = NVFP4BlockScaling()

every_way = pytest.mark.parametrize("reentrant", [True, False])
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Stack(nn.Module):
    """One module of each kind; the first linear is called twice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = qv.Linear(32, 32, device=device)
        self.norm_linear = qv.LayerNormLinear(32, 32, normalization="RMSNorm", device=device)
        self.mlp = qv.LayerNormMLP(32, 48, activation="swiglu", device=device)
        self.experts = qv.GroupedLinear(3, 32, 32, device=device)
        self.ops = qv.ops.Sequential(
            qv.ops.Quantize(forward=True, backward=True),
            qv.ops.Linear(32, 32, device=device),
            qv.ops.GELU(),
            qv.ops.BasicLinear(32, 32, device=device),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.norm_linear(self.linear(x))
        x = x + self.mlp(x) + self.ops(x)
        return self.linear(x + self.experts(x, [5, 0, x.shape[0] - 5]))


def run(model: nn.Module, x: torch.Tensor, way: bool | None) -> torch.Tensor:
    return model(x) if way is None else checkpoint(model, x, use_reentrant=way)


def results(model: nn.Module, leaves: list[torch.Tensor], ys: list[Any]) -> dict[str, Any]:
    found = {f"dx{i}": x.grad.cpu() for i, x in enumerate(leaves)}
    return found | {f"y{i}": y.detach().cpu() for i, y in enumerate(ys)} | gradients(model)


def steps(
    model: nn.Module, inputs: list[torch.Tensor], recipe: Any, way: bool | None
) -> dict[str, Any]:
    """All forwards in one region, then all backwards from the newest on."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    with qv.autocast(recipe=recipe):
        ys = [run(model, x, way) for x in leaves]
    for y in reversed(ys):
        y.square().mean().backward()
    return results(model, leaves, ys)


@every_recipe
@every_way
def test_checkpointed_training_equals_plain(devices, recipe, reentrant: bool) -> None:
    model = Stack(devices[1])
    plain = copy.deepcopy(model)
    for i in range(3):
        x = torch.randn(16, 32, device=devices[1]) * 2.0**i
        expected = steps(plain, [x], recipe, None)
        assert_same(steps(model, [x], recipe, reentrant), expected)
        if scaling(plain):  # of the recipes that have any state
            assert_same(scaling(model), scaling(plain))


@every_way
def test_several_forwards_before_their_backwards(devices, reentrant: bool) -> None:
    """Each recomputation draws what its own forward drew, whichever comes first."""
    model = Stack(devices[1])
    plain = copy.deepcopy(model)
    for _ in range(2):
        inputs = [torch.randn(16, 32, device=devices[1]) for _ in range(3)]
        expected = steps(plain, inputs, NVFP4, None)
        assert_same(steps(model, inputs, NVFP4, reentrant), expected)
        assert_same(scaling(model), scaling(plain))
        with torch.no_grad(), qv.autocast(recipe=NVFP4):  # inference takes no numbers
            model(inputs[0])


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + checkpoint(self.inner, x, use_reentrant=False)
        return x


def test_a_checkpoint_inside_a_checkpoint(devices) -> None:
    nested = Nested(Stack(devices[1]))
    plain = copy.deepcopy(nested)
    for _ in range(2):
        x = torch.randn(16, 32, device=devices[1])
        expected = steps(plain, [x], NVFP4, None)
        assert_same(steps(nested, [x], NVFP4, False), expected)
        assert_same(scaling(nested), scaling(plain))


def test_two_backwards_through_one_graph_draw_the_same(devices) -> None:
    model = Stack(devices[1])
    x = torch.randn(16, 32, device=devices[1], requires_grad=True)
    with qv.autocast(recipe=NVFP4):
        y = checkpoint(model, x, use_reentrant=False).square().mean()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])


@every_way
def test_the_mode_of_evaluation_changes_nothing(devices, reentrant: bool) -> None:
    model = Stack(devices[1]).eval()
    plain = copy.deepcopy(model)
    inputs = [torch.randn(16, 32, device=devices[1]) for _ in range(2)]
    expected = steps(plain, inputs, NVFP4, None)
    assert_same(steps(model, inputs, NVFP4, reentrant), expected)
    before = scaling(model)
    for each in (model, model.train()):
        with torch.no_grad(), qv.autocast(recipe=NVFP4):
            each(inputs[0])
    assert_same(scaling(model), before)


def test_another_forward_draws_other_bits(devices) -> None:
    """Else the tests above would pass without any random bits."""
    model = Stack(devices[1])
    x = torch.randn(16, 32, device=devices[1])
    first, second = (steps(model, [x], NVFP4, None) for _ in range(2))
    assert torch.equal(first["y0"], second["y0"])
    assert not torch.equal(first["dx0"], second["dx0"])
