"""QuaverConfig: its arguments, its way through JSON, and its names."""

import json

import pytest
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

import quaver as qv
from quaver.conversion import ConversionError
from quaver.errors import RecipeError
from quaver.integrations.transformers import QuaverConfig, QuaverHfQuantizer
from quaver.recipe import RECIPE_NAMES, Float8CurrentScaling, Format


def test_the_public_names_are_one_class_and_loaded_on_demand() -> None:
    assert qv.QuaverConfig is QuaverConfig
    assert qv.integrations.transformers.QuaverConfig is QuaverConfig
    with pytest.raises(AttributeError, match="no attribute 'torchao'"):
        qv.integrations.torchao  # noqa: B018


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_config_survives_json(recipe: str) -> None:
    config = QuaverConfig(recipe, weights="keep", keep_in_high_precision=["lm_head", "*.gate"])
    values = json.loads(config.to_json_string())
    assert values["quant_method"] == "quaver"
    back = AutoQuantizationConfig.from_dict(values)
    assert type(back) is QuaverConfig
    assert back.to_dict() == config.to_dict()
    assert back.make_recipe() == RECIPE_NAMES[recipe]()
    assert isinstance(AutoHfQuantizer.from_config(values), QuaverHfQuantizer)


def test_options_reach_the_recipe() -> None:
    options = {"use_power_2_scales": True, "fp8_format": "E4M3"}
    config = QuaverConfig("current", recipe_options=options)
    expected = Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3)
    assert AutoQuantizationConfig.from_dict(config.to_dict()).make_recipe() == expected
    assert QuaverConfig(keep_in_high_precision="head").keep_in_high_precision == ["head"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "fp8"}, RecipeError, "one of delayed, current, .* not 'fp8'"),
        ({"recipe": None}, RecipeError, "one of delayed"),
        ({"recipe": Float8CurrentScaling()}, RecipeError, "a name, .* not a Float8CurrentScaling"),
        ({"recipe_options": {"margin": 1}}, RecipeError, "Float8CurrentScaling cannot take"),
        ({"recipe_options": {"fp8_format": "E3M4"}}, RecipeError, "E4M3, E5M2, HYBRID, not 'E3M4'"),
        ({"recipe_options": [1]}, RecipeError, r"must be a dict, .* not \[1\]"),
        ({"recipe_options": {"fp8_format": Format.E4M3}}, RecipeError, "JSON.* by its name"),
        ({"keep_in_high_precision": None}, ConversionError, r"must be globs, .* not None; \[\]"),
        ({"weights": "fp8"}, ConversionError, '"keep" or "quantize", not \'fp8\''),
        ({"keep_in_high_precision": ["a["]}, ConversionError, "must close each"),
        ({"keep_in_high_precision": [1]}, ConversionError, "must hold globs"),
        ({"format_version": 2}, ConversionError, "version 2; update quaver"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments, error, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        QuaverConfig(**arguments)
    assert "\n" not in str(caught.value)
