"""What runs where, in a table."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import ConversionError, convert, status
from quaver.recipe import DelayedScaling
from tests.conversion.models import Mlp, calibrate


def test_status_before_and_after_calibration():
    recipe = DelayedScaling(amax_history_len=8)
    model = Mlp()
    convert(model, recipe, rules=[])
    found = status(model)
    assert [layer.name for layer in found.layers] == ["fc1", "fc2"]
    layer = found.layers[0]
    assert (layer.class_name, layer.device, layer.recipe) == ("Linear", torch.device("cpu"), recipe)
    assert layer.path.startswith("emulated on cpu")
    assert layer.scales_device == torch.device("cpu")
    assert not layer.calibrated
    assert not layer.offloaded
    assert layer.weight_dtype == torch.float32
    assert layer.weight_bytes == 4 * (16 * 32 + 32)
    assert found.other_linears == 1
    calibrate(model, torch.randn(4, 16))
    assert all(layer.calibrated for layer in status(model).layers)


@pytest.mark.parametrize("length", [1, 8])
def test_first_scale_one_counts_as_calibrated_only_once_something_was_seen(length):
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, DelayedScaling(first_scale="one", amax_history_len=length))
    assert not status(model).layers[0].calibrated
    model(torch.randn(4, 4))
    assert status(model).layers[0].calibrated


def test_a_layer_without_a_recipe_has_no_scales_before_it_is_used():
    model = nn.Sequential(qv.nn.Linear(4, 4))
    layer = status(model).layers[0]
    assert (layer.recipe, layer.scales_device, layer.calibrated) == (None, None, False)


def test_quantized_and_shared_weights_are_counted_as_stored():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16, bias=False)})
    model["b"].weight = model["a"].weight
    convert(model, weights="quantize")
    found = status(model)
    assert [layer.weight_dtype for layer in found.layers] == [torch.float8_e4m3fn] * 2
    assert [layer.weight_bytes for layer in found.layers] == [256 + 4 + 64, 256 + 4]
    assert found.weight_bytes == 256 + 4 + 64


def test_each_layer_shows_its_own_device(devices):
    first, second = devices
    model = nn.Sequential(nn.Linear(4, 4).to(first), nn.Linear(4, 4).to(second))
    convert(model, DelayedScaling())
    found = status(model)
    assert [layer.device for layer in found.layers] == [first, second]
    assert [layer.scales_device for layer in found.layers] == [first, second]
    text = str(found)
    for device in (first, second):
        assert f"{device}: FP8 products " in text


def test_the_table_names_layers_recipes_paths_and_totals():
    model = Mlp()
    convert(model, DelayedScaling(margin=1), exclude=())
    convert(model, DelayedScaling(), include="fc1")
    text = str(status(model))
    for words in (
        "3 layers of Quaver's",
        "lm_head",
        "DelayedScaling #1",
        "DelayedScaling #2: DelayedScaling(margin=1",
        "cpu: FP8 products emulated on cpu",
        "nn.Linear layers that are not Quaver's: 0.",
    ):
        assert words in text
    assert str(status(nn.Linear(2, 2))) == "No layer is Quaver's (1 are nn.Linear)."
    with pytest.raises(ConversionError, match=r"model must be an nn\.Module, not str"):
        status("model")
