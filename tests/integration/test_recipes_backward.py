"""What the backward of the stateless recipes computes with, and activation recompute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.errors import RecipeError
from quaver.quantizers import quantizer_of
from quaver.recipe import DelayedScaling, NVFP4BlockScaling, Recipe, Role
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    equal,
    linear_like,
    train_step,
)
from tests.integration.recipes import RECIPES, STATELESS
from tests.integration.test_checkpointing import Model, step

Devices = list[torch.device]

stateless = pytest.mark.parametrize("name", STATELESS)


def with_override(name: str, override: str) -> Recipe:
    return replace(RECIPES[name], backward_override=override)


def forward_operand(recipe: Recipe, tensor: str, module: qv.Linear, x: torch.Tensor) -> Any:
    """What the forward computes with for x, in float32."""
    quantizer = quantizer_of(recipe, Role(tensor, repr(module), type(module).__name__))
    if quantizer is None:
        return x.float()
    quantizer.columnwise = False
    return quantizer(x).dequantize(torch.float32)


# ---- backward_override


@stateless
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_override_computes_with_the_operands_it_names(
    devices: Devices, name: str, override: str, dtype: torch.dtype
) -> None:
    recipe, device = with_override(name, override), devices[1]
    layer = qv.Linear(32, 48, device=device, dtype=dtype)
    x, grad = torch.randn(8, 32, dtype=dtype), torch.randn(8, 48).to(dtype)
    with launches() as log:
        results = train_step(layer, x.to(device), grad, recipe)
    assert_guarded(log, [device], least=4)
    plain = train_step(linear_like(layer, device), x.to(device), grad, RECIPES[name])
    assert equal(results["y"], plain["y"])  # the forward is quantized all the same
    x, g, w = x.to(device), grad.to(device).float(), layer.weight.detach()
    if override == "high_precision":
        left, right = x.float(), w.float()
    else:
        left = forward_operand(recipe, "input", layer, x)
        right = forward_operand(recipe, "weight", layer, w)
    assert equal(results["dx"], (g @ right).to(dtype))
    assert equal(results["weight"], (g.t() @ left).to(dtype))
    assert equal(results["bias"], g.sum(0).to(dtype))
    assert not equal(results["dx"], plain["dx"])


@stateless
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_an_override_with_quantized_weights(devices: Devices, name: str, override: str) -> None:
    recipe, device = with_override(name, override), devices[1]
    with qv.quantized_model_init(recipe=recipe):
        layer = qv.Linear(30, 17, device=device)
    x, grad = torch.randn(5, 30, device=device), torch.randn(5, 17)
    results = train_step(layer, x, grad, recipe)
    g = grad.to(device)
    assert equal(results["dx"], g @ layer.weight.dequantize())
    left = x if override == "high_precision" else forward_operand(recipe, "input", layer, x)
    assert equal(results["weight"], g.t() @ left)


@stateless
def test_an_override_over_odd_shapes_and_a_fused_bias(devices: Devices, name: str) -> None:
    recipe, device = with_override(name, "dequantized"), devices[1]
    model = qv.ops.Sequential(
        qv.ops.BasicLinear(30, 17, device=device), qv.ops.Bias(17, device=device)
    )
    for rows in (0, 1, 3):
        x, grad = torch.randn(rows, 30, device=device), torch.randn(rows, 17)
        results = train_step(model, x, grad, recipe)
        weight = forward_operand(recipe, "weight", model[0], model[0].weight.detach())
        assert equal(results["dx"], grad.to(device) @ weight)


def test_delayed_scaling_has_no_override_and_others_refuse_what_they_do_not_know() -> None:
    with pytest.raises(TypeError, match="backward_override"):
        DelayedScaling(backward_override="dequantized")
    for name in STATELESS:
        with pytest.raises(RecipeError, match="backward_override must be None"):
            with_override(name, "fp32")


# ---- recompute


@stateless
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_equals_plain(devices: Devices, name: str, reentrant: bool) -> None:
    """But for the numbers that NVFP4 draws, which a recompute draws again."""
    recipe = RECIPES[name]
    plain, model = Model(devices, None), Model(devices, reentrant)
    model.load_state_dict(plain.state_dict())
    for i in range(3):
        x = torch.randn(4, 16, device=devices[0]) * 2.0**i
        with launches() as log:
            results = step(model, x, recipe)
        assert_guarded(log, devices, least=8 * 8)
        assert [launch.kernel for launch in log].count("scaled_mm") == 8 * 4
        expected = step(plain, x, recipe)
        if name == "nvfp4":
            assert equal(results["y"], expected["y"])
            for key, value in results.items():
                assert value.isfinite().all(), key
        else:
            assert_same(results, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_nvfp4_without_random_rounding_too(devices: Devices, reentrant: bool) -> None:
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    plain, model = Model(devices, None), Model(devices, reentrant)
    model.load_state_dict(plain.state_dict())
    for _ in range(2):
        x = torch.randn(4, 16, device=devices[0])
        assert_same(step(model, x, recipe), step(plain, x, recipe))


@stateless
@pytest.mark.filterwarnings("ignore:the recipe changes")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_outside_of_the_region_uses_its_recipe(
    devices: Devices, name: str, reentrant: bool
) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(devices[1])
    qv.convert(model, RECIPES[name])
    outputs: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, y: outputs.append(y.detach().clone()))
    other = RECIPES["mxfp8" if name != "mxfp8" else "block"]
    for recipe in (None, other):  # the attached one, then another in force
        x = torch.randn(4, 16, device=devices[1], requires_grad=True)
        outputs.clear()
        with qv.autocast(recipe=recipe):
            y = checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
        assert len(outputs) == 2
        assert equal(*outputs)
