"""weights="quantize": FP8 parameters, tied ones shared, and a way back that says what it costs."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import ConversionError, convert, convert_back
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import Mlp, calibrate


def is_quantized(layer: nn.Module) -> bool:
    return isinstance(layer.weight, qv.Float8Tensor)


def test_weights_become_fp8_on_their_own_device_and_the_rest_stays():
    model = Mlp().to(torch.bfloat16)
    model.fc1.weight.requires_grad_(False)
    weight, bias = model.fc1.weight.detach().clone(), model.fc1.bias
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    expected = model(x)
    report = convert(model, DelayedScaling(), weights="quantize")
    assert [(layer.name, layer.weights) for layer in report.converted] == [
        ("fc1", "quantized"),
        ("fc2", "quantized"),
    ]
    assert is_quantized(model.fc1)
    assert isinstance(model.fc1.weight, nn.Parameter)
    assert model.fc1.weight.dtype == torch.bfloat16
    assert model.fc1.weight.shape == (32, 16)
    assert not model.fc1.weight.requires_grad
    assert model.fc2.weight.requires_grad
    assert model.fc1.bias is bias
    assert not is_quantized(model.lm_head)
    error = (model.fc1.weight.dequantize() - weight).abs()
    assert (error <= weight.abs() / 16 + weight.abs().max() / 448 / 16).all()
    assert list(dict(model.named_parameters())) == [
        "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "lm_head.weight",
    ]  # fmt: skip
    calibrate(model, x)
    with torch.no_grad(), launches() as log:
        out = model(x)
    kernels = [launch.kernel for launch in log]
    assert kernels.count("scaled_mm") == 2
    assert kernels.count("cast") == 2  # the inputs only: the weights are FP8 already
    assert torch.allclose(out, expected, atol=0.1)


def test_convert_back_dequantizes_and_says_so():
    model = Mlp()
    before = model.fc1.weight.detach().clone()
    convert(model, weights="quantize")
    stored = model.fc1.weight.dequantize()
    report = convert_back(model)
    assert type(model.fc1) is nn.Linear
    assert type(model.fc1.weight) is nn.Parameter
    assert model.fc1.weight.requires_grad
    assert torch.equal(model.fc1.weight, stored)
    assert not torch.equal(model.fc1.weight, before)
    assert {layer.weights for layer in report.converted} == {"dequantized"}
    assert "2 weights had been quantized; they came back with FP8's rounding." in str(report)


def tied_model() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 4),
            "output": nn.Linear(4, 8, bias=False),
            "a": nn.Linear(4, 4),
            "b": nn.Linear(4, 4),
            "c": nn.Linear(4, 4),
        }
    )
    model["output"].weight = model["embedding"].weight
    model["b"].weight = model["a"].weight
    return model


def test_a_weight_tied_to_an_embedding_is_kept_and_said_so():
    model = tied_model()
    report = convert(model, weights="quantize")
    outcomes = {layer.name: (layer.weights, layer.note) for layer in report.converted}
    assert outcomes == {
        "output": ("kept", "weight kept: tied to embedding.weight"),
        "a": ("quantized", ""),
        "b": ("quantized", ""),
        "c": ("quantized", ""),
    }
    assert model["output"].weight is model["embedding"].weight
    assert type(model["embedding"].weight) is nn.Parameter


def test_a_weight_tied_among_converted_layers_is_one_fp8_tensor_and_goes_back_as_one():
    model = tied_model()
    convert(model, weights="quantize")
    assert is_quantized(model["a"])
    assert model["b"].weight is model["a"].weight
    assert model["c"].weight is not model["a"].weight
    convert_back(model)
    assert type(model["a"].weight) is nn.Parameter
    assert model["b"].weight is model["a"].weight


def test_a_weight_tied_to_a_layer_that_is_left_is_kept():
    model = tied_model()
    report = convert(model, weights="quantize", exclude=("b", "output"))
    outcomes = {layer.name: (layer.weights, layer.note) for layer in report.converted}
    assert outcomes == {
        "a": ("kept", "weight kept: tied to b.weight"),
        "c": ("quantized", ""),
    }
    assert type(model["b"]) is nn.Linear
    assert model["a"].weight is model["b"].weight


def test_keep_first_and_quantize_later():
    model = Mlp()
    convert(model, DelayedScaling())
    report = convert(model, weights="quantize")
    assert {layer.weights for layer in report.converted} == {"quantized"}
    report = convert(model, weights="keep")
    assert {layer.weights for layer in report.converted} == {"quantized"}
    assert report.converted[0].note == "weight is FP8 already"
    assert convert_back(model).converted[0].weights == "dequantized"


def test_weights_that_were_fp8_from_the_start_stay_so_on_the_way_back():
    with qv.quantized_model_init():
        model = nn.Sequential(qv.nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    convert(model, DelayedScaling(), weights="quantize")
    assert model[0].weight is weight
    assert is_quantized(model[1])
    convert_back(model)
    assert model[0].weight is weight
    assert type(model[1].weight) is nn.Parameter


def test_a_weight_that_cannot_be_quantized_leaves_nothing_converted(monkeypatch):
    model = Mlp()
    keys = {name: list(module.__dict__) for name, module in model.named_modules()}
    original = qv.nn.Linear.quantize_weight

    def fail_at_fc2(self):
        if self.qualified_name == "fc2":
            raise RuntimeError("out of memory")
        original(self)

    monkeypatch.setattr(qv.nn.Linear, "quantize_weight", fail_at_fc2)
    with pytest.raises(ConversionError) as caught:
        convert(model, DelayedScaling(), weights="quantize")
    assert str(caught.value) == (
        "fc2.weight could not be quantized (RuntimeError: out of memory), so the model is not "
        "converted; the 1 quantized before it keep FP8's rounding"
    )
    assert type(model.fc1) is type(model.fc2) is nn.Linear
    assert type(model.fc1.weight) is nn.Parameter
    assert not model._forward_pre_hooks
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == keys


def test_training_goes_on_in_what_is_not_quantized():
    model = Mlp()
    convert(model, DelayedScaling(), weights="quantize")
    for layer in (model.fc1, model.fc2):
        layer.weight.requires_grad_(False)
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    assert model.fc1.weight.grad is None
    assert model.fc1.bias.grad.abs().sum() > 0
    assert model.lm_head.weight.grad.abs().sum() > 0
