"""The demo's figures as values."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.cli.demo.devices import start_devices
from quaver.cli.demo.evaluate import calibrate
from quaver.cli.demo.layers import LayerError, layer_errors, record_outputs
from quaver.cli.demo.metrics import Comparison
from quaver.cli.demo.model import load_model
from quaver.cli.demo.result import (
    DemoResult,
    DeviceShare,
    device_shares,
    weight_bytes,
    write_json,
)
from quaver.cli.errors import CommandError
from quaver.conversion import ConversionReport

CPU = torch.device("cpu")
RECIPE = qv.recipe.DelayedScaling()


def result(nll_fp8: float, recipe: str = "delayed") -> DemoResult:
    return DemoResult(
        recipe=recipe,
        comparison=Comparison(tokens=2, nll_full=2.0, nll_fp8=nll_fp8, kl=0.5, agreed=1),
        split_equals_unsplit=True,
        weight_bytes_full=40,
        weight_bytes_fp8=10,
        devices=[DeviceShare("cpu", 2, None, ["cpu"])],
        layers=[LayerError("a", "cpu", math.nan), LayerError("b", "cpu", None)],
        conversion=ConversionReport(),
    )


def test_the_json_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json([result(4.0), result(6.0, "nvfp4")], path)
    figures = {
        "recipe": "delayed",
        "perplexity_full": math.e,
        "perplexity_fp8": math.exp(2),
        "perplexity_ratio": math.e,
        "kl_mean": 0.25,
        "top1_agreement": 0.5,
        "split_equals_unsplit": True,
        "weight_bytes_full": 40,
        "weight_bytes_fp8": 10,
    }
    second = {"recipe": "nvfp4", "perplexity_fp8": math.exp(3), "perplexity_ratio": math.exp(2)}
    assert json.loads(path.read_text()) == {
        **figures,
        "recipes": [figures, figures | second],
        "devices": [{"device": "cpu", "layers": 2, "peak_bytes": None, "scales": ["cpu"]}],
        "layers": [
            {"name": "a", "device": "cpu", "relative_error": None},
            {"name": "b", "device": "cpu", "relative_error": None},
        ],
    }


@pytest.mark.parametrize("nll", [math.nan, math.inf, 1e6])
def test_what_is_not_finite_is_null(nll: float, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json([result(nll)], path)
    written = json.loads(path.read_text())
    assert written["perplexity_fp8"] is None
    assert written["recipes"][0]["perplexity_fp8"] is None


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"gone/out\.json cannot be written: No such file"):
        write_json([result(4.0)], tmp_path / "gone" / "out.json")


def test_weight_bytes_count_ties_once_and_fp8_by_the_byte() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    model[2].half()
    assert weight_bytes(model) == 64 * 4 + 8 * 4 + (32 + 4) * 2
    qv.convert(model, recipe=RECIPE, weights="quantize")
    scale_inv = 4
    assert weight_bytes(model) == (64 + scale_inv) + 8 * 4 + (32 + scale_inv) + 4 * 2


def test_a_scale_on_the_wrong_device_shows() -> None:
    first, second = start_devices(["sim:0", "sim:1"])
    model = nn.Sequential(nn.Linear(4, 4, device=first), nn.Linear(4, 4, device=second))
    qv.convert(model, recipe=RECIPE)
    homes = [(s.device, s.layers, s.scales) for s in device_shares(model, [first, second])]
    assert homes == [("sim:0", 1, ["sim:0"]), ("sim:1", 1, ["sim:1"])]
    state = model[1].recipe_states["forward"]
    state.scale = state.scale.to(first)
    assert device_shares(model, [first, second])[1].scales == ["sim:0", "sim:1"]


def test_layers_are_given_full_precisions_input(llama_folder: Path) -> None:
    """A ruined first layer is seen at once, and no layer behind it suffers."""
    model = load_model(llama_folder).model
    ids = torch.arange(30)[None]
    recorded = record_outputs(model, ids, CPU)
    qv.convert(model, recipe=RECIPE)
    calibrate(model, [ids], RECIPE, CPU, lambda: None)
    sound = {e.name: e.relative_error for e in layer_errors(model, recorded, ids, CPU)}
    ruined = model.get_submodule("model.layers.0.self_attn.v_proj")
    with torch.no_grad():
        ruined.weight.neg_()
    errors = layer_errors(model, recorded, ids, CPU)
    assert errors[0].name == "model.layers.0.self_attn.v_proj"
    assert errors[0].relative_error == pytest.approx(2.0, rel=0.05)
    for error in errors[1:]:
        assert error.relative_error == sound[error.name], error.name


def test_a_layer_that_is_never_called_is_last_and_nan_is_first(llama_folder: Path) -> None:
    model = load_model(llama_folder).model
    ids = torch.arange(30)[None]
    recorded = record_outputs(model, ids, CPU)
    model.spare = nn.Linear(4, 4)
    qv.convert(model, recipe=RECIPE)
    calibrate(model, [ids], RECIPE, CPU, lambda: None)
    with torch.no_grad():
        model.get_submodule("model.layers.2.mlp.up_proj").weight[0, 0] = math.nan
    errors = layer_errors(model, recorded, ids, CPU)
    assert errors[0].name == "model.layers.2.mlp.up_proj"
    assert math.isnan(errors[0].relative_error or 0.0)
    assert errors[-1] == LayerError("spare", "cpu", None)
