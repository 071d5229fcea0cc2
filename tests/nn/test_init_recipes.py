"""quantized_model_init for every recipe."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.errors import RecipeError
from quaver.quantizers import quantizer_of
from quaver.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
)
from quaver.testing import launches
from tests.samples import normal
from tests.tensors.make import same_payload


def no_weights(role: Role) -> qv.MXFP8Quantizer | None:
    return None if role.tensor == "weight" else qv.MXFP8Quantizer(torch.float8_e4m3fn)


CASES = {
    "delayed": (DelayedScaling(), qv.Float8Tensor),
    "current": (Float8CurrentScaling(use_power_2_scales=True), qv.Float8Tensor),
    "block": (Float8BlockScaling(), qv.Float8BlockwiseTensor),
    "block 1D": (Float8BlockScaling(w_block_scaling_dim=1), qv.Float8BlockwiseTensor),
    "mxfp8": (MXFP8BlockScaling(), qv.MXFP8Tensor),
    "nvfp4": (NVFP4BlockScaling(), qv.NVFP4Tensor),
    "nvfp4 1D": (NVFP4BlockScaling(disable_2d_quantization=True), qv.NVFP4Tensor),
    "custom": (CustomRecipe(lambda role: qv.NVFP4Quantizer()), qv.NVFP4Tensor),
}
LOSSLESS = ("delayed", "current", "block", "nvfp4")
"""Where the transpose needs no copy of its own."""

cases = pytest.mark.parametrize("name", CASES)


def made(kind: type[nn.Module], device: torch.device | str, **options: object) -> nn.Module:
    torch.manual_seed(2)
    with qv.quantized_model_init(**options):
        return kind(30, 12, device=device)


def drawn(kind: type[nn.Module], device: torch.device | str) -> torch.Tensor:
    torch.manual_seed(2)
    return kind(30, 12, device=device).weight.detach()


@cases
@pytest.mark.parametrize("kind", [qv.Linear, qv.ops.Linear, qv.ops.BasicLinear])
@pytest.mark.parametrize("current", [0, 1])
def test_weights_are_the_recipes_and_on_their_own_device(
    devices, name: str, kind: type[nn.Module], current: int
) -> None:
    recipe, expected = CASES[name]
    with torch.accelerator.device_index(current), launches() as log:
        layer = made(kind, devices[1], recipe=recipe)
    assert log
    assert {(entry.device, entry.current) for entry in log} == {(devices[1], devices[1])}
    weight = layer.weight
    assert type(weight) is expected
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.device == devices[1]
    assert weight.shape == (12, 30)
    assert (weight.columnwise_data is None) == (name in LOSSLESS)
    quantizer = quantizer_of(recipe, Role("weight", "", kind.__name__))
    quantizer.columnwise = weight.columnwise_data is not None
    assert same_payload(weight, quantizer(drawn(kind, devices[1])))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_value_before_can_be_kept_on_the_cpu(devices, name: str, dtype: torch.dtype) -> None:
    recipe, _ = CASES[name]
    torch.manual_seed(2)
    with qv.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = qv.Linear(30, 12, device=devices[1], dtype=dtype)
    torch.manual_seed(2)
    expected = qv.Linear(30, 12, device=devices[1], dtype=dtype).weight.detach()
    value = layer.weight.get_high_precision_init_val()
    assert (value.device.type, value.dtype) == ("cpu", dtype)
    assert torch.equal(value, expected.cpu())
    twin = copy.deepcopy(layer)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    assert torch.equal(twin.weight.get_high_precision_init_val(), expected.cpu())


@cases
def test_on_meta_then_to_empty_then_reset(devices, name: str) -> None:
    recipe, expected = CASES[name]
    layer = made(qv.Linear, "meta", recipe=recipe, preserve_high_precision_init_val=True)
    assert type(layer.weight) is expected
    assert layer.weight.device.type == "meta"
    layer.to_empty(device=devices[1])
    torch.manual_seed(2)
    layer.reset_parameters()
    assert layer.weight.device == devices[1]
    assert same_payload(layer.weight, made(qv.Linear, devices[1], recipe=recipe).weight)
    assert layer.weight.get_high_precision_init_val() is not None


@cases
def test_a_trained_weight_is_not_quantized_again(devices, name: str) -> None:
    recipe, _ = CASES[name]
    layer = made(qv.Linear, devices[1], recipe=recipe)
    plain = qv.Linear(30, 12, device=devices[1])
    x = normal(5, 30, device=devices[1])
    counts = []
    for each in (layer, plain):
        with launches() as log, qv.autocast(recipe=recipe):
            each(x).sum().backward()
        counts.append(sum(entry.kernel.endswith("cast") for entry in log))
    assert counts[0] == counts[1] - 1
    assert layer.weight.grad.device == devices[1]
    assert type(layer.weight.grad) is torch.Tensor


@cases
def test_quantizing_later_is_the_same(devices, name: str) -> None:
    recipe, _ = CASES[name]
    torch.manual_seed(2)
    layer = qv.Linear(30, 12, device=devices[1], recipe=recipe)
    layer.quantize_weight()
    assert same_payload(layer.weight, made(qv.Linear, devices[1], recipe=recipe).weight)
    stored = layer.weight.dequantize()
    layer.dequantize_weight()
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, stored)


def test_frozen_weights_need_no_columnwise_copy(devices) -> None:
    layer = qv.Linear(30, 12, device=devices[1], recipe=MXFP8BlockScaling())
    layer.weight.requires_grad_(False)
    layer.quantize_weight()
    assert layer.weight.columnwise_data is None
    x = normal(5, 30, device=devices[1]).requires_grad_()
    layer(x).sum().backward()  # which still flows through it
    exact = layer.weight.dequantize().sum(0).expand(5, 30)
    assert (x.grad - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("factory", [no_weights, lambda role: qv.IdentityQuantizer()])
def test_weights_that_a_recipe_leaves_alone_stay_plain(devices, factory) -> None:
    recipe = CustomRecipe(factory)
    layer = made(qv.Linear, devices[1], recipe=recipe)
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, drawn(qv.Linear, devices[1]))
    with qv.autocast(recipe=recipe):
        layer(normal(5, 30, device=devices[1])).sum().backward()
    assert layer.weight.grad is not None


def test_the_format_is_the_recipes() -> None:
    for fp8_format in (Format.E4M3, Format.HYBRID):
        layer = made(qv.Linear, "cpu", recipe=Float8CurrentScaling(fp8_format=fp8_format))
        assert layer.weight.rowwise_data.dtype == torch.float8_e4m3fn


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="must be a recipe such as DelayedScaling"):
        qv.quantized_model_init(recipe="mxfp8")
    with (
        pytest.raises(RecipeError, match="must return a quantizer or None"),
        qv.quantized_model_init(recipe=CustomRecipe(lambda role: 8)),
    ):
        qv.Linear(4, 4)
