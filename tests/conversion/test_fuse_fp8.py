"""fuse=True in FP8: against the unfused conversion, with quantized weights, and when it fails."""

import copy
import math

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import ConversionError, convert, convert_back, status
from quaver.nn import LayerNormMLP
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from quaver.tensors import QuantizedTensor
from quaver.testing import launches
from tests.conversion.models import calibrate, tiny_gpt2, tiny_llama, tokens

RECIPE = DelayedScaling(amax_history_len=16)

# E4M3's step is 2^-3 of the power of two below a value. Rounding errs by up to half a step, evenly:
# with a standard deviation of at most 2^-3 / sqrt(12) of the value.
ROUNDING = 2**-3 / math.sqrt(12)
# A product of two rounded operands has twice that variance in each term, and the difference of two
# conversions, which round with other scales, twice that of one.
NOISE = math.sqrt(2) * math.sqrt(2) * ROUNDING

# Where both conversions have the same scales, only float32's rounding differs before the casts, a
# few 2^-24 of a value, which turns a rounding to a step of 2^-3 about once in 10^5 times. A turned
# one is off by a whole step, 12 of the variances: for one in 1000, this part of the noise.
TURNED = math.sqrt(12 / 1000) * ROUNDING / NOISE


def add_noise(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """What `NOISE` makes of a linear layer's output: independent errors of the terms add up."""
    weight = module.weight.t() if isinstance(module, nn.Linear) else module.weight
    deviation = NOISE * (args[0].square() @ weight.square()).sqrt()
    return output + deviation * torch.randn_like(output)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def spread_of_logits(model: nn.Module, ids: torch.Tensor, logits: torch.Tensor) -> float:
    """How far the logits may move, as a standard deviation: the noise sent through the model."""
    noisy = copy.deepcopy(model)
    for name, module in noisy.named_modules():
        if name.endswith(("_proj", "c_attn", "c_fc")):
            module.register_forward_hook(add_noise)
    with torch.no_grad():
        return rms(torch.stack([noisy(ids).logits - logits for _ in range(16)]))


@pytest.mark.parametrize(
    "recipe",
    [RECIPE, Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize(("make", "products"), [(tiny_llama, 8), (tiny_gpt2, 8)])
def test_logits_are_those_of_the_unfused_conversion_but_for_rounding(make, products, recipe):
    model = make()
    ids = tokens(4)
    with torch.no_grad():
        logits = model(ids).logits
        spread = spread_of_logits(model, ids, logits)
    assert spread < 0.1 * rms(logits)  # so that a wrong column would be seen
    fused = copy.deepcopy(model)
    convert(model, recipe)
    convert(fused, recipe, fuse=True)
    calibrate(model, ids)
    calibrate(fused, ids)
    with torch.no_grad(), launches() as log:
        found = fused(ids).logits
    assert sum(launch.kernel == "scaled_mm" for launch in log) == products
    assert {launch.kernel for launch in log} & {"norm", "norm_cast"}
    with torch.no_grad():
        difference = found - model(ids).logits
    same_scales = make is tiny_gpt2 or "Block" in type(recipe).__name__  # one QKV; powers of two
    assert rms(difference) <= (TURNED if same_scales else 1) * spread
    assert not torch.equal(found, logits)


def test_scales_of_blocks_are_those_of_the_unfused_weights():
    model = tiny_llama(1)
    fused = copy.deepcopy(model)
    for each, fuse in ((model, False), (fused, True)):
        convert(each, MXFP8BlockScaling(), weights="quantize", fuse=fuse)
    block, other = model.model.layers[0], fused.model.layers[0]
    pairs = [
        (other.input_layernorm.weight, [block.self_attn.get_submodule(f"{n}_proj") for n in "qkv"]),
        (other.mlp.fc1_weight, [block.mlp.gate_proj, block.mlp.up_proj]),
        (other.mlp.fc2_weight, [block.mlp.down_proj]),
    ]
    for weight, layers in pairs:
        rows = torch.cat([layer.weight.dequantize() for layer in layers])
        assert torch.equal(weight.dequantize(), rows)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_quantized_weights_come_back_rounded_into_the_same_parameters(make):
    model = make(1)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    ids = tokens()
    report = convert(model, RECIPE, weights="quantize", fuse=True)
    assert [module.weights for module in report.fused] == ["quantized"] * 2
    layers = status(model).layers
    assert len(layers) == 3
    assert {layer.weight_dtype for layer in layers} == {torch.float8_e4m3fn}
    calibrate(model, ids)
    with torch.no_grad():
        expected = model(ids).logits
    report = convert_back(model)
    assert "not the values from before: rounded to FP8; taken apart" in {
        layer.note for layer in report.converted
    }
    convert(model, RECIPE)
    calibrate(model, ids)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected, atol=0.05)
    rounded = 0
    for name, (_, value) in before.items():
        now = model.get_parameter(name)
        assert not isinstance(now, QuantizedTensor)
        # half a step, or half of the smallest step below the normal range, 2^-10 of 448 an amax
        assert ((now - value).abs() <= 2**-4 * value.abs() + value.abs().max() * 2**-17).all()
        rounded += not torch.equal(now, value)
    assert rounded == (7 if make is tiny_llama else 4)


def test_a_weight_that_cannot_be_quantized_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_llama(1)
    parameters = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    classes = {name: type(module) for name, module in model.named_modules()}

    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LayerNormMLP, "quantize_weight", fail)
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.weight could not be quantized"):
        convert(model, Float8CurrentScaling(), weights="quantize", fuse=True)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert list(dict(model.named_parameters())) == list(parameters)
    untouched = model.model.layers[0].mlp.up_proj.weight
    assert untouched is parameters["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(untouched, values["model.layers.0.mlp.up_proj.weight"])
    assert not model._forward_pre_hooks


def test_without_a_recipe_fp8_runs_inside_autocast_only():
    model = tiny_llama(1)
    convert(model, fuse=True)
    ids = tokens()
    with torch.no_grad(), launches() as log:
        model(ids)
    assert not any(launch.kernel == "scaled_mm" for launch in log)
    with launches() as log, qv.autocast(recipe=RECIPE):
        model(ids)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 4
