"""A quantized tensor as a linear's input: its own operands are multiplied, without another cast."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.formats import E4M3
from quaver.functional import quantize
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, equal, gradients, scaling

CASES = {
    "current": (Float8CurrentScaling(), qv.Float8CurrentScalingQuantizer(E4M3)),
    "delayed": (DelayedScaling(), qv.Float8CurrentScalingQuantizer(E4M3)),
    "block": (Float8BlockScaling(), qv.Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "mxfp8": (MXFP8BlockScaling(), qv.MXFP8Quantizer(E4M3)),
    "nvfp4": (
        NVFP4BlockScaling(disable_stochastic_rounding=True),
        qv.NVFP4Quantizer(hadamard=True),
    ),
}
every_case = pytest.mark.parametrize(("recipe", "quantizer"), CASES.values(), ids=CASES)


def step(linear: nn.Module, x: torch.Tensor, recipe, quantizer, grad) -> dict[str, torch.Tensor]:
    """With a quantizer x is quantized ahead of the layer."""
    linear.zero_grad()
    x = x.detach().requires_grad_()
    with qv.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x if quantizer is None else quantize(x, quantizer))
    y.backward(grad.to(y.dtype))
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(linear)}


@every_case
@pytest.mark.parametrize("shape", [(40, 64), (2, 20, 64)], ids=str)
def test_what_the_layer_would_have_made_gives_the_same(recipe, quantizer, shape) -> None:
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 48)
    linear, twin = qv.Linear(64, 48), qv.Linear(64, 48)
    twin.load_state_dict(linear.state_dict())
    assert quantizer.columnwise
    got, expected = step(linear, x, recipe, quantizer, grad), step(twin, x, recipe, None, grad)
    assert_same(got, expected)


@every_case
def test_several_layers_share_one_cast(recipe, quantizer) -> None:
    layers = [qv.Linear(64, n, bias=False) for n in (48, 32, 16)]
    x = torch.randn(40, 64, requires_grad=True)
    for layer in layers:  # states and weights' scales
        step(layer, x, recipe, None, torch.ones(40, layer.out_features))
    with launches() as log, qv.autocast(recipe=recipe):
        shared = quantize(x, quantizer)
        alone = len(log)
        outputs = [layer(shared) for layer in layers]
    casts = [launch.kernel for launch in log if "cast" in launch.kernel]
    assert alone >= 1
    assert sum("mm" in launch.kernel for launch in log) == 3
    assert len(casts) < 2 * 3  # as many would be of inputs and weights
    x.grad = None
    sum(y.sum() for y in outputs).backward()
    assert x.grad.abs().sum() > 0


def test_a_tensor_with_rows_alone_gets_its_columns_from_them() -> None:
    """One scale serves both directions; blocks along the columns are made of the rounded values."""
    x, grad = torch.randn(40, 64), torch.randn(40, 48)
    linear, twin = qv.Linear(64, 48), qv.Linear(64, 48)
    twin.load_state_dict(linear.state_dict())
    recipe, quantizer = CASES["current"]
    rows = qv.Float8CurrentScalingQuantizer(E4M3, columnwise=False)
    assert_same(step(linear, x, recipe, rows, grad), step(twin, x, recipe, quantizer, grad))
    recipe, quantizer = CASES["mxfp8"]
    rows = qv.MXFP8Quantizer(E4M3, columnwise=False)
    linear, twin = qv.Linear(64, 48), qv.Linear(64, 48)
    twin.load_state_dict(linear.state_dict())
    got = step(linear, x, recipe, rows, grad)
    expected = step(twin, rows(x).dequantize(), recipe, None, grad)
    assert equal(got["weight"], expected["weight"])


def test_columns_are_transformed_as_the_gradients_are() -> None:
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    x, grad = torch.randn(64, 64), torch.randn(64, 48)
    linear, exact = qv.Linear(64, 48), qv.Linear(64, 48)
    exact.load_state_dict(linear.state_dict())
    got = step(linear, x, recipe, qv.NVFP4Quantizer(hadamard=False), grad)
    expected = step(exact, x, None, None, grad)
    error = (got["weight"] - expected["weight"]).norm() / expected["weight"].norm()
    assert error < 0.25  # untransformed columns would have nothing to do with the gradient's
    values = qv.NVFP4Quantizer(hadamard=False)(x).dequantize()
    again = qv.Linear(64, 48)
    again.load_state_dict(linear.state_dict())
    assert equal(got["weight"], step(again, values, recipe, None, grad)["weight"])


def test_the_inputs_amax_is_not_recorded_and_nothing_warns() -> None:
    recipe, quantizer = CASES["delayed"]
    linear = qv.Linear(64, 48)
    step(linear, torch.randn(40, 64), recipe, quantizer, torch.randn(40, 48))
    history = linear.recipe_states["forward"].amax_history
    assert history[:, 0].eq(0).all()
    assert history[:, 1].gt(0).any()
    with torch.no_grad(), qv.autocast(recipe=recipe):
        linear(quantizer(torch.randn(4, 64)))


@every_case
def test_in_high_precision_its_values_count(recipe, quantizer) -> None:
    linear, x = qv.Linear(64, 48), torch.randn(40, 64)
    y = linear(quantizer(x))
    assert torch.equal(y, linear(quantizer(x).dequantize()))
    leaf = x.requires_grad_()
    linear(quantize(leaf, quantizer)).sum().backward()
    torch.testing.assert_close(leaf.grad, linear.weight.detach().sum(0).expand(40, 64))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_overrides_of_the_backward(override: str) -> None:
    recipe = Float8CurrentScaling(backward_override=override)
    x, grad = torch.randn(40, 64), torch.randn(40, 48)
    linear = qv.Linear(64, 48)
    quantizer = CASES["current"][1]
    got = step(linear, x, recipe, quantizer, grad)
    torch.testing.assert_close(got["weight"], grad.t() @ quantizer(x).dequantize())


def test_autocast_and_saving_the_input_as_it_came() -> None:
    recipe, quantizer = CASES["current"]
    linear = qv.Linear(64, 48, wgrad=qv.WgradOptions(save_original_input=True))
    twin = qv.Linear(64, 48)
    twin.load_state_dict(linear.state_dict())
    x, grad = torch.randn(40, 64), torch.randn(40, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step(linear, x, recipe, quantizer, grad)
        expected = step(twin, x, recipe, quantizer, grad)
    assert got["y"].dtype == torch.bfloat16
    assert got["dx"].dtype == torch.float32
    assert_same(got, expected)


def test_experts_take_their_rows_of_it() -> None:
    recipe, quantizer = CASES["current"]
    experts, twin = qv.GroupedLinear(3, 64, 48), qv.GroupedLinear(3, 64, 48)
    twin.load_state_dict(experts.state_dict())
    x, grad = torch.randn(40, 64), torch.randn(40, 48)
    values, splits = quantizer(x).dequantize(), [16, 0, 24]
    for each, given in ((experts, quantize(x, quantizer)), (twin, values)):
        with qv.autocast(recipe=recipe):
            y = each(given, splits)
        y.backward(grad)
        assert y.shape == (40, 48)
    error = (experts.weight2.grad - grad[16:].t() @ values[16:]).norm() / grad.norm()
    assert error < 1
    plain = experts(quantizer(x), splits)
    torch.testing.assert_close(plain, twin(values, splits))


def test_two_dimensional_blocks_on_both_sides_are_refused() -> None:
    linear = qv.Linear(256, 128)
    with (
        qv.autocast(recipe=Float8BlockScaling()),
        pytest.raises(qv.RecipeError, match="at most one may have blocks"),
    ):
        linear(qv.Float8BlockQuantizer(E4M3)(torch.randn(128, 256)))


def test_a_wrong_width_or_device_is_said(devices) -> None:
    quantizer = CASES["current"][1]
    linear = qv.Linear(64, 48, device=devices[0])
    with pytest.raises(ValueError, match="must have 64 features"):
        linear(quantizer(torch.randn(4, 32, device=devices[0])))
    with pytest.raises(qv.DeviceMismatchError, match=f"x is on {devices[1]}"):
        linear(quantizer(torch.randn(4, 64, device=devices[1])))


@every_case
def test_on_a_device_it_is_the_same_and_guarded(devices, recipe, quantizer) -> None:
    x, grad = torch.randn(40, 64), torch.randn(40, 48)
    results = []
    values = qv.Linear(64, 48).state_dict()
    for device in devices:
        linear = qv.Linear(64, 48, device=device)
        linear.load_state_dict(values)
        with launches() as log:
            results.append(step(linear, x.to(device), recipe, quantizer, grad.to(device)))
        assert_guarded(log, [device])
    assert_same(*results)
    assert scaling(linear) is not None
