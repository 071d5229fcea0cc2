"""For each loader, device map and recipe: outputs equal the directly built model's, bit for bit."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import quaver as qv
from quaver.checkpoint import load_model, save_model
from quaver.recipe import named_recipe
from quaver.testing import launches
from tests.conversion.models import tokens
from tests.integration.helpers import assert_guarded, assert_same, equal, quantized_modules, scaling
from tests.integration.recipes import TENSORS
from tests.integrations.transformers.folders import (
    LAYERS,
    NAMES,
    built,
    device_maps,
    load,
    logits,
    saved,
)

Devices = list[torch.device]
Loader = Callable[[Path, str, str, Any], nn.Module]


def with_config(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    return load(folder, recipe, weights, device_map=places)


def saved_and_loaded(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    load(folder, recipe, weights).save_pretrained(folder / "saved")
    return load(folder / "saved", device_map=places)


def converted_after(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    model = load(folder, device_map=places)
    qv.convert(model, named_recipe(recipe), weights=weights)
    return model


def converted_before(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    model = load(folder)
    qv.convert(model, named_recipe(recipe), weights=weights)
    return model if places is None else dispatch_model(model, places)


def by_accelerate(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    source = built(folder, recipe, weights, torch.device("cpu"))
    torch.save(source.state_dict(), folder / "model.bin")
    # Weights that are to be quantized need values, be it others: convert refuses meta.
    with init_empty_weights() if weights == "keep" else nullcontext():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    qv.convert(model, named_recipe(recipe), weights=weights)
    return load_checkpoint_and_dispatch(model.eval(), str(folder / "model.bin"), places)


def by_load_model(folder: Path, recipe: str, weights: str, places: Any) -> nn.Module:
    save_model(built(folder, recipe, weights, torch.device("cpu")), folder / "own")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    qv.convert(model, named_recipe(recipe), weights=weights)
    if places is not None and "cpu" not in places.values():
        model = dispatch_model(model, places)  # each tensor finds its device
        places = None
    load_model(model, folder / "own")
    return model if places is None else dispatch_model(model, places)


LOADERS: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "config": (with_config, ("keep", "quantize")),
    "saved": (saved_and_loaded, ("keep", "quantize")),
    "after": (converted_after, ("keep", "quantize")),
    "before": (converted_before, ("keep", "quantize")),
    "accelerate": (by_accelerate, ("keep", "quantize")),
    "load_model": (by_load_model, ("keep", "quantize")),
}


def cases() -> list[Any]:
    """All that can be; the default run takes those that differ most."""
    found = []
    for name, (_, ways) in LOADERS.items():
        for weights in ways:
            for place in ("none", "one", "names", "two", "cpu"):
                if name in ("accelerate", "after", "before") and place == "none":
                    continue  # a model on meta needs a map; the others are the twin itself
                if (name, place) == ("saved", "one"):
                    continue  # test_saving.py
                if (name, weights, place) == ("after", "quantize", "cpu"):
                    continue  # refused: tests/conversion/test_dispatch.py
                for recipe in NAMES if place != "names" else ["current"]:
                    usual = recipe == ("delayed" if weights == "keep" else "mxfp8")
                    usual = usual and (place == "two" or (name, place) == ("config", "cpu"))
                    marks = [] if usual else pytest.mark.slow
                    found.append(pytest.param(name, weights, place, recipe, marks=marks))
    return found


@pytest.mark.parametrize(("loader", "weights", "place", "recipe"), cases())
def test_outputs_equal_those_of_the_model_that_convert_makes(
    devices: Devices, tmp_path: Path, loader: str, weights: str, place: str, recipe: str
) -> None:
    saved(tmp_path)
    ids = tokens()
    model = LOADERS[loader][0](tmp_path, recipe, weights, device_maps(devices)[place])
    assert len(quantized_modules(model)) == LAYERS
    main = {"none": torch.device("cpu"), "one": devices[1]}.get(place, devices[0])
    twin = built(tmp_path, recipe, weights, main)
    offloaded = place == "cpu" and weights == "keep"  # then scales come with the first use
    if recipe == "delayed" and not offloaded:
        assert_same(scaling(model), scaling(twin))
    with launches() as log:
        outputs = logits(model, ids, calibrated=recipe != "delayed")
    assert equal(outputs, logits(twin, ids, calibrated=recipe != "delayed"))
    if recipe == "delayed":
        assert_same(scaling(model), scaling(twin))
    assert [launch.kernel for launch in log].count("scaled_mm") == LAYERS
    assert_guarded(log, devices if place in ("names", "two") else [main])
    kind = TENSORS[recipe] if weights == "quantize" else nn.Parameter
    assert {type(layer.weight) for layer in quantized_modules(model).values()} == {kind}
