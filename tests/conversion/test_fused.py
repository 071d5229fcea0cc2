"""convert, convert_back and status of modules with several weights."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.tensors import QuantizedTensor
from tests.integration.recipes import RECIPES
from tests.samples import normal

DELAYED = RECIPES["delayed"]


class Block(nn.Module):
    def __init__(self, device="cpu") -> None:
        super().__init__()
        self.qkv = qv.LayerNormLinear(16, 16, device=device)
        self.mlp = qv.LayerNormMLP(16, 32, activation="swiglu", device=device)

    def forward(self, x):
        return self.mlp(self.qkv(x))


def weights(model) -> list[torch.Tensor]:
    return [model.qkv.weight, model.mlp.fc1_weight, model.mlp.fc2_weight]


def test_a_recipe_is_attached_and_in_force_without_a_region(devices) -> None:
    model = Block(devices[1])
    x = normal(4, 16, device=devices[1])
    exact = model(x)
    report = qv.convert(model, DELAYED)
    assert [(layer.name, layer.device, layer.weights) for layer in report.converted] == [
        ("qkv", devices[1], "kept"),
        ("mlp", devices[1], "kept"),
    ]
    assert model.mlp.recipe == DELAYED
    scales = model.mlp.recipe_states["forward"].scale
    assert (scales[[1, 4]] != 1).all(), "the weights' scales are set from their own amaxes"
    assert (scales[[0, 2, 3, 5]] == 1).all()
    y = model(x)
    assert not torch.equal(y, exact)
    with qv.autocast(recipe=DELAYED):
        assert torch.equal(Block.forward(copy.deepcopy(model), x), model(x))
    qv.convert_back(model)
    assert torch.equal(model(x), exact)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_quantized_and_come_back(devices, name) -> None:
    model = Block(devices[1])
    before = [weight.detach().clone() for weight in weights(model)]
    report = qv.convert(model, RECIPES[name], weights="quantize")
    assert [layer.weights for layer in report.converted] == ["quantized"] * 2
    for weight, plain in zip(weights(model), before, strict=True):
        assert isinstance(weight, QuantizedTensor)
        assert weight.device == devices[1]
        assert (weight.dequantize() - plain).norm() < 0.15 * plain.norm()
    again = qv.convert(model, RECIPES[name], weights="quantize")
    assert all("FP8 already" in layer.note for layer in again.converted)
    qv.convert_back(model)
    assert {type(weight) for weight in weights(model)} == {nn.Parameter}


def test_status_shows_them(devices) -> None:
    model = Block(devices[0])
    qv.convert(model, DELAYED)
    found = qv.status(model)
    assert [(layer.name, layer.class_name) for layer in found.layers] == [
        ("qkv", "LayerNormLinear"),
        ("mlp", "LayerNormMLP"),
    ]
    assert not any(layer.calibrated for layer in found.layers)
    size = sum(p.numel() for p in model.parameters()) * 4
    assert found.weight_bytes == sum(layer.weight_bytes for layer in found.layers) == size
    x = normal(4, 16, device=devices[0])
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        model(x)
    assert all(layer.calibrated for layer in qv.status(model).layers)


def test_tied_weights_stay_tied(devices) -> None:
    model = nn.Sequential(*(qv.LayerNormMLP(16, 32, device=devices[1]) for _ in range(2)))
    for name in ("fc1_weight", "fc2_weight"):
        setattr(model[1], name, getattr(model[0], name))
    qv.convert(model, DELAYED, weights="quantize")
    for name in ("fc1_weight", "fc2_weight"):
        assert isinstance(getattr(model[0], name), QuantizedTensor)
        assert getattr(model[0], name) is getattr(model[1], name)
    partly = nn.Sequential(*(qv.LayerNormMLP(16, 32, device=devices[1]) for _ in range(2)))
    partly[1].fc1_weight = partly[0].fc1_weight
    report = qv.convert(partly, DELAYED, weights="quantize")
    assert [layer.weights for layer in report.converted] == ["kept", "kept"]
    assert "tied to 1.fc1_weight" in report.converted[0].note
    assert partly[1].fc1_weight is partly[0].fc1_weight


def test_offloaded_weights_cannot_be_quantized() -> None:
    with pytest.raises(qv.QuaverError, match="offloaded or not loaded yet"):
        qv.convert(Block("meta"), DELAYED, weights="quantize")
    report = qv.convert(Block("meta"), DELAYED)
    assert all("no values yet" in layer.note for layer in report.converted)


def test_layers_that_lose_are_skipped() -> None:
    report = qv.convert(Block(), DELAYED, skip_slow=True)
    assert [layer.name for layer in report.skipped] == ["qkv", "mlp"]
    assert all("emulated on cpu" in layer.reason for layer in report.skipped)
