"""Quantize: rounding to a recipe's format, forward and backward."""

import copy
import pickle

import pytest
import torch

import quaver as qv
from quaver import ops
from quaver.formats import E4M3, E5M2
from quaver.quantizers import Float8CurrentScalingQuantizer, quantizer_of
from quaver.recipe import DelayedScaling, NVFP4BlockScaling, Role
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, reference_device, scaling
from tests.integration.recipes import RECIPES
from tests.samples import normal

ROUNDED = NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)


def rounded(x: torch.Tensor, recipe: qv.recipe.Recipe, tensor: str) -> torch.Tensor:
    """What x stands for when the recipe has quantized it, by the recipe's own quantizer."""
    if isinstance(recipe, DelayedScaling):
        quantizer = Float8CurrentScalingQuantizer(E4M3 if tensor == "input" else E5M2)
    else:
        quantizer = quantizer_of(recipe, Role(tensor, "q", "Quantize"))
    return quantizer(x).dequantize()


@pytest.mark.parametrize("width", [32, 30, 7])
@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", RECIPES)
def test_it_rounds_as_the_recipes_quantizer(
    name: str, which: tuple[bool, bool], width: int
) -> None:
    recipe = ROUNDED if name == "nvfp4" else RECIPES[name]
    forward, backward = which
    op = ops.Quantize(forward, backward)
    op.qualified_name = "q"
    x = normal(2, 4, width).requires_grad_()
    grad = normal(2, 4, width, name="grad")
    with qv.autocast(recipe=recipe):
        y = op(x)
    y.backward(grad)
    rows, grads = x.detach().reshape(8, width), grad.reshape(8, width)
    expected = rounded(rows, recipe, "input") if forward else rows
    assert torch.equal(y, expected.reshape(x.shape))
    expected = rounded(grads, recipe, "grad_output") if backward else grads
    assert torch.equal(x.grad, expected.reshape(x.shape))
    assert torch.equal(y, x) != forward
    assert torch.equal(x.grad, grad) != backward


@pytest.mark.parametrize("name", RECIPES)
def test_every_device_gives_the_same_bits_and_scales(devices, name: str) -> None:
    home = reference_device(devices)
    local = ops.Sequential(ops.Quantize(True, True), ops.BasicLinear(32, 16), ops.Quantize())
    there = copy.deepcopy(local).to(devices[1])
    local.to(home)
    for i in range(3):
        found = []
        for model, device in ((local, home), (there, devices[1])):
            x = (normal(4, 32, name=f"{i}") * 2**i).to(device).requires_grad_()
            with qv.autocast(recipe=RECIPES[name]), launches() as log:
                y = model(x)
                y.backward(normal(4, 16, name="grad").to(device))
            if model is there:
                assert_guarded(log, [devices[1]])
            found.append({"y": y.cpu(), "x": x.grad.cpu(), "w": model[1].weight.grad.cpu()})
        assert_same(*found)
    if scaling(local):
        assert_same(scaling(local), scaling(there))


def test_delayed_scaling_learns_from_what_it_sees() -> None:
    op = ops.Quantize(True, True)
    for i in range(3):
        x = (normal(4, 8) * 2**i).requires_grad_()
        with qv.autocast(recipe=RECIPES["delayed"]):
            y = op(x)
        y.backward(normal(4, 8, name="grad"))
    forward, backward = op.recipe_states["forward"], op.recipe_states["backward"]
    assert forward.scale.shape == backward.scale.shape == (1,)
    assert forward.unset == backward.unset == [False]
    assert torch.equal(forward.scale[0], torch.tensor(448.0) / x.detach().abs().max())
    largest = normal(4, 8, name="grad").abs().max()
    assert torch.equal(backward.scale[0], torch.tensor(57344.0) / largest)
    again = ops.Quantize(True, True)
    again.load_state_dict(op.state_dict())
    assert_same(scaling(again), scaling(op))
    assert_same(scaling(pickle.loads(pickle.dumps(op))), scaling(op))


def test_nvfp4s_gradients_are_rounded_at_random() -> None:
    def gradient(op: ops.Quantize) -> torch.Tensor:
        x = normal(4, 32).requires_grad_()
        with qv.autocast(recipe=RECIPES["nvfp4"]):
            op(x).backward(normal(4, 32, name="grad"))
        return x.grad

    op, loaded = ops.Quantize(False, True), ops.Quantize(False, True)
    first = gradient(op)
    loaded.load_state_dict(op.state_dict())
    second = gradient(op)
    assert not torch.equal(first, second)
    assert torch.equal(gradient(loaded), second)  # the bits go by the number of the forward


def test_without_a_recipe_it_is_the_identity_and_calibration_only_looks() -> None:
    op, x = ops.Quantize(True, True), normal(4, 8)
    assert op(x) is x
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        assert op(x) is x
    learnt = op.recipe_states["forward"].scale[0]
    assert torch.equal(learnt, torch.tensor(448.0) / x.abs().max())
    assert torch.equal(
        ops.Quantize(recipe=RECIPES["current"])(x), rounded(x, RECIPES["current"], "input")
    )


def test_errors() -> None:
    with pytest.raises(qv.QuaverError, match=r"does nothing; take Identity\(\)"):
        ops.Quantize(False)
    with pytest.raises(TypeError, match="high-precision"):
        ops.Quantize()(torch.ones(3, dtype=torch.int32))
    with pytest.raises(qv.QuaverError, match="not be a scalar"):
        ops.Quantize()(torch.tensor(1.0))
    x = normal(4, 8).requires_grad_()
    with qv.autocast(recipe=RECIPES["current"]):
        y = ops.Quantize(True, True)(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()
    assert repr(ops.Quantize()) == "Quantize(forward=True, backward=False)"
