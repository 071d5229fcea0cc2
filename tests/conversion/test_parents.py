"""Parents that read a weight themselves, or pass their layers' forward over."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import convert, convert_back
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import calibrate


def test_out_proj_of_multihead_attention_is_left_with_the_reason():
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected, _ = model(x, x, x)
    report = convert(model, DelayedScaling(), include_subclasses=True)
    assert report.converted == ()
    assert [layer.name for layer in report.skipped] == ["out_proj"]
    assert "MultiheadAttention reads .weight itself" in report.skipped[0].reason
    assert torch.equal(model(x, x, x)[0], expected)


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, num_layers=2).eval()


def test_the_encoder_layers_fast_path_is_disabled_and_restored(encoder):
    x = torch.randn(2, 5, 16)
    keys = [list(module.__dict__) for module in encoder.modules()]
    with torch.no_grad():
        expected = encoder(x)
    report = convert(encoder, DelayedScaling())
    assert [layer.name for layer in report.converted] == [
        "layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2",
    ]  # fmt: skip
    assert [module.name for module in report.adjusted] == ["", "layers.0", "layers.1"]
    assert "fast path of eval mode disabled" in str(report)
    calibrate(encoder, x)
    for module in encoder.modules():  # hooks would disable it as well: it has to be off by itself
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    with torch.no_grad(), launches() as log, qv.autocast():
        out = encoder(x)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 4
    assert torch.allclose(out, expected, atol=0.1)
    restored = convert_back(encoder)
    assert [module.change for module in restored.adjusted] == [
        "restored use_nested_tensor",
        "restored activation_relu_or_gelu",
        "restored activation_relu_or_gelu",
    ]
    assert encoder.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in encoder.layers] == [1, 1]
    assert [list(module.__dict__) for module in encoder.modules()] == keys
    with torch.no_grad():
        assert torch.equal(encoder(x), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_masks_work_without_nested_tensors(encoder):
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        convert(encoder, DelayedScaling())
        calibrate(encoder, x, src_key_padding_mask=padding)
        with launches() as log:
            out = encoder(x, src_key_padding_mask=padding)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 4
    assert torch.allclose(out[~padding], expected[~padding], atol=0.1)


def test_an_encoder_layer_without_converted_layers_keeps_its_fast_path(encoder):
    report = convert(encoder, DelayedScaling(), include="nothing")
    assert report.adjusted == ()
    assert encoder.use_nested_tensor
    assert encoder.layers[0].activation_relu_or_gelu == 1
    report = convert(encoder, DelayedScaling(), include="layers.1.linear2")
    assert [module.name for module in report.adjusted] == ["", "layers.1"]
    assert encoder.layers[0].activation_relu_or_gelu == 1
    assert encoder.layers[1].activation_relu_or_gelu == 0


def test_converting_twice_still_restores_the_fast_path(encoder):
    convert(encoder, DelayedScaling())
    twin = copy.deepcopy(encoder)
    convert(encoder, DelayedScaling(margin=1))
    for model in (encoder, twin):
        convert_back(model)
        assert model.use_nested_tensor
        assert model.layers[0].activation_relu_or_gelu == 1


class Router(nn.Module):
    """Computes with its layer's weight, and never calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.classifier.weight.float())


class Mixer(nn.Module):
    """Calls its layer in training, and computes with the weight in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(x.to(self.other.weight.dtype))
        return self.proj(x) if self.training else self.fused(x)

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.proj.bias, x, self.proj.weight.t())


def test_a_layer_that_its_parent_never_calls_is_left():
    model = nn.Sequential(Router())
    report = convert(model, DelayedScaling(), weights="quantize")
    assert report.converted == ()
    assert "Router reads .weight itself and never calls it" in report.skipped[0].reason
    model(torch.randn(3, 8))


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_layer_that_its_parent_sometimes_bypasses_is_listed_and_keeps_its_weight(weights):
    model = nn.Sequential(Mixer())
    x = torch.randn(3, 8)
    expected = model(x)
    report = convert(model, DelayedScaling(), weights=weights)
    assert [layer.name for layer in report.bypassed] == ["0.proj"]
    assert "Mixer computes with .weight itself in fused" in report.bypassed[0].reason
    assert "Bypassed by their parents" in str(report)
    assert type(model[0].proj.weight) is nn.Parameter
    quantized = {layer.name: layer.weights for layer in report.converted}
    assert quantized == {"0.proj": "kept", "0.other": "kept" if weights == "keep" else "quantized"}
    with launches() as log:
        assert torch.allclose(model(x), expected, atol=0.2)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 2
    with launches() as log:
        assert torch.allclose(model.eval()(x), expected, atol=0.2)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 1
