"""`save_pretrained` and back: bit for bit, on other devices, and never from a broken folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import quaver as qv
from quaver.checkpoint import load_model
from quaver.recipe import named_recipe
from tests.conversion.models import tokens
from tests.integration.helpers import assert_same, equal, quantized_modules, scaling
from tests.integration.recipes import parts
from tests.integrations.transformers.folders import (
    NAMES,
    built,
    load,
    logits,
    rewrite,
    saved,
    split,
)

Devices = list[torch.device]
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("weights", ["keep", "quantize"])
@pytest.mark.parametrize(
    "recipe",
    [
        name if name in ("delayed", "nvfp4") else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_a_model_comes_back_bit_for_bit_on_other_devices(
    devices: Devices, tmp_path: Path, recipe: str, weights: str
) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", recipe, weights, device_map=split(devices))
    ids = tokens()
    logits(model, ids, calibrated=recipe != "delayed")
    model.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (written["recipe"], written["weights"]) == (recipe, weights)
    for places in (None, {"": devices[0]}, split(devices[::-1]), split([devices[1], "cpu"])):
        twin = load(tmp_path / "saved", device_map=places)
        offloaded = places is not None and "cpu" in places.values()
        if recipe == "delayed" or (recipe == "nvfp4" and not offloaded):
            assert_same(scaling(twin), scaling(model))
        if not offloaded:
            pairs = zip(model.named_parameters(), twin.named_parameters(), strict=True)
            for (name, mine), (other, theirs) in pairs:
                assert name == other
                assert type(mine) is type(theirs)
                if hasattr(mine, "parts"):
                    assert_same(parts(mine), parts(theirs))
                else:
                    assert equal(mine, theirs)
        if places is not None:  # attention on the CPU itself rounds differently
            assert equal(logits(twin, ids), logits(model, ids))


def test_quantized_weights_take_the_place_of_plain_ones_in_the_file(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    load(tmp_path / "plain", "mxfp8", "quantize").save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if name.startswith(WEIGHT)}  # noqa: SIM118
        assert names == {WEIGHT, f"{WEIGHT}_scale_inv"}
        data, scales = file.get_tensor(WEIGHT), file.get_tensor(f"{WEIGHT}_scale_inv")
    assert (data.dtype, data.shape) == (torch.float8_e4m3fn, (64, 32))
    assert (scales.dtype, scales.shape) == (torch.float8_e8m0fnu, (64, 1))


@pytest.mark.parametrize("recipe", ["block", "nvfp4"])
def test_quavers_own_checkpoint_reader_takes_the_folder(tmp_path: Path, recipe: str) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", recipe, "quantize")
    model.save_pretrained(tmp_path / "saved")
    twin = built(tmp_path / "plain", recipe, "quantize", torch.device("cpu"))
    load_model(twin, tmp_path / "saved")
    ids = tokens()
    assert equal(logits(twin, ids), logits(model, ids))


def test_weights_that_stay_plain_take_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    load(tmp_path / "plain", "current", "quantize").save_pretrained(tmp_path / "saved")
    twin = load(tmp_path / "saved", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert twin(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_model_that_was_converted_back_is_saved_as_a_plain_one(
    tmp_path: Path, weights: str
) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", "mxfp8", weights)
    qv.convert_back(model)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    twin = load(tmp_path / "saved")
    assert not quantized_modules(twin)
    ids = tokens()
    assert equal(twin(ids).logits, model(ids).logits)


def test_a_model_in_shards(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", "current", "quantize")
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    ids = tokens()
    assert equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))


def test_a_model_with_offloaded_weights_is_saved(devices: Devices, tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", "block", "quantize", device_map=split([devices[0], "cpu"]))
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "saved")
    ids = tokens()
    twin = load(tmp_path / "saved", device_map={"": devices[0]})
    assert equal(logits(twin, ids), logits(model, ids))


def test_scales_on_disk_are_found_again(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    model = load(tmp_path / "plain", "delayed", "keep")
    ids = tokens()
    expected = logits(model, ids, calibrated=False)
    model.save_pretrained(tmp_path / "saved")
    twin = load(tmp_path / "saved", device_map=split(["cpu", "disk"]))
    assert equal(logits(twin, ids), expected)
    assert_same(scaling(twin), scaling(model))


def test_a_converted_model_that_trained_keeps_its_scales(tmp_path: Path) -> None:
    """Saved without a QuaverConfig, as any model is, and loaded with one."""
    model = built(saved(tmp_path / "plain"), "delayed", "keep", torch.device("cpu"))
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "saved")
    twin = load(tmp_path / "saved", "delayed", "keep")
    assert_same(scaling(twin), scaling(model))
    assert equal(logits(twin, ids), logits(model, ids))


def test_a_config_beside_a_saved_one_gives_way_with_a_warning(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    load(tmp_path / "plain", "current", "quantize").save_pretrained(tmp_path / "saved")
    with pytest.warns(UserWarning, match="`quantization_config` from the model will be used"):
        model = load(tmp_path / "saved", "block", "keep")
    layer = quantized_modules(model)["model.layers.0.mlp.up_proj"]
    assert layer.recipe == named_recipe("current")
    assert isinstance(layer.weight, qv.Float8Tensor)


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(f"{WEIGHT}{name}")


def put(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{WEIGHT}{name}": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("_scale_inv"), "must have the parts rowwise_data, rowwise_scale_inv"),
        (put("_scale_inv", torch.tensor([float("nan")])), "finite scales of at least 0"),
        (put("_scale_inv", torch.tensor([-1.0])), "finite scales of at least 0"),
        (put("_scale_inv", torch.ones(2)), r"must be torch.float32 \(1,\), .* \(2,\)"),
        (put("", torch.zeros(64, 32)), "must be torch.float8_e4m3fn"),
    ],
)
def test_a_damaged_checkpoint_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    saved(tmp_path / "plain")
    load(tmp_path / "plain", "current", "quantize").save_pretrained(tmp_path / "saved")
    rewrite(tmp_path / "saved", change)
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path / "saved")


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    load(tmp_path / "plain", "current", "quantize").save_pretrained(tmp_path / "saved")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("", "_scale_inv"):
            tensors.pop(f"{WEIGHT}{part}")

    rewrite(tmp_path / "saved", change)
    with pytest.raises(qv.CheckpointError, match=r"layers.1.mlp.up_proj.* 0 other layers"):
        load(tmp_path / "saved")
