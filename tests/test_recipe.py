"""Recipes are values: defaults, validation, equality, hash."""

import dataclasses
import pickle

import pytest
import torch

import quaver as qv
from quaver import recipe as recipes
from quaver.recipe import DelayedScaling, Format, delayed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def test_defaults_are_transformer_engines() -> None:
    shown = {f.name: getattr(DelayedScaling(), f.name) for f in dataclasses.fields(DelayedScaling)}
    assert shown == {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "first_scale": "amax",
    }
    assert DelayedScaling().delayed()
    assert DelayedScaling() == recipes.DEFAULT_RECIPE


def test_formats_by_direction() -> None:
    assert [Format.HYBRID.dtype(mode) for mode in ("forward", "backward")] == [E4M3, E5M2]
    assert [Format.E4M3.dtype(mode) for mode in ("forward", "backward")] == [E4M3, E4M3]
    assert [Format.E5M2.dtype(mode) for mode in ("forward", "backward")] == [E5M2, E5M2]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("margin", 0.5, "an integer"),
        ("margin", True, "an integer"),
        ("margin", 101, "an integer from -100 to 100"),
        ("margin", -101, "an integer from -100 to 100"),
        ("fp8_format", Format.E5M2, "Format.HYBRID or Format.E4M3"),
        ("fp8_format", "HYBRID", "Format.HYBRID or Format.E4M3"),
        ("amax_history_len", 0, "an integer of at least 1"),
        ("amax_history_len", 16.0, "an integer of at least 1"),
        ("amax_history_len", None, "an integer of at least 1"),
        ("amax_compute_algo", "mean", '"max", "most_recent" or a function'),
        ("amax_compute_algo", None, '"max", "most_recent" or a function'),
        ("scaling_factor_compute_algo", "max", "None or a function"),
        ("fp8_dpa", 1, "True or False"),
        ("fp8_mha", True, "True only with fp8_dpa=True"),
        ("first_scale", 1, '"amax" or "one"'),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value, expected: str) -> None:
    with pytest.raises(qv.RecipeError) as caught:
        DelayedScaling(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"DelayedScaling.{field} must be ")
    assert expected in message
    assert message.endswith(f"not {value!r}")
    assert "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"margin": -2},
        {"margin": 100},
        {"amax_history_len": 1},
        {"amax_history_len": 100_000},
        {"amax_compute_algo": "most_recent"},
        {"amax_compute_algo": largest},
        {"scaling_factor_compute_algo": lambda amax, scale, limit, recipe: scale},
        {"fp8_format": Format.E4M3},
        {"reduce_amax": False},
        {"fp8_dpa": True},
        {"first_scale": "one"},
    ],
    ids=str,
)
def test_recipes_differ_by_each_field_and_equal_by_value(fields) -> None:
    recipe = DelayedScaling(**fields)
    assert recipe != DelayedScaling()
    assert recipe == DelayedScaling(**fields)
    assert hash(recipe) == hash(DelayedScaling(**fields))
    assert len({recipe, DelayedScaling(**fields), DelayedScaling()}) == 2


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (recipes.Float8CurrentScaling, {"backward_override": "high_precision"}),
        (recipes.Float8BlockScaling, {}),
        (recipes.MXFP8BlockScaling, {}),
        (recipes.NVFP4BlockScaling, {}),
        (recipes.CustomRecipe, {"qfactory": lambda role: None}),
    ],
)
def test_fp8_attention_is_refused_where_it_would_be_ignored(recipe, fields) -> None:
    with pytest.raises(qv.RecipeError, match=rf"{recipe.__name__}\.fp8_dpa must be False"):
        recipe(fp8_dpa=True, **fields)
    assert recipes.Float8CurrentScaling(fp8_dpa=True, backward_override="dequantized").fp8_dpa


def test_functions_are_compared_by_identity() -> None:
    def other(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0)

    first, second = (
        DelayedScaling(amax_compute_algo=largest),
        DelayedScaling(amax_compute_algo=other),
    )
    assert first != second
    assert {first: 1}.get(second) is None


def test_a_recipe_is_frozen_and_can_be_replaced_and_pickled() -> None:
    recipe = DelayedScaling(margin=1, amax_compute_algo=largest)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 2
    assert dataclasses.replace(recipe, margin=2) == DelayedScaling(
        margin=2, amax_compute_algo=largest
    )
    with pytest.raises(qv.RecipeError):
        dataclasses.replace(recipe, amax_history_len=0)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(
    ("field", "value"), [("interval", 1), ("override_linear_precision", (False, False, False))]
)
def test_what_old_callers_pass_warns_once_and_is_ignored(
    field: str, value, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(delayed, "_warned_fields", set())
    with pytest.warns(UserWarning, match=rf"{field}=\.\.\..* has no effect") as caught:
        made = DelayedScaling(**{field: value})
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert DelayedScaling(**{field: value}) == made == DelayedScaling()
    assert len(recwarn) == 0, "warned twice"


@pytest.mark.parametrize("bad", ["delayed", DelayedScaling, 3, Format.HYBRID])
def test_what_is_no_recipe_is_refused_by_everything_that_takes_one(bad) -> None:
    for make in (
        lambda: qv.autocast(recipe=bad),
        lambda: qv.quantized_model_init(recipe=bad),
        lambda: qv.Linear(2, 2, recipe=bad),
        lambda: qv.RecipeState.create(bad, mode="forward", num_quantizers=1, device="cpu"),
    ):
        with pytest.raises(qv.RecipeError, match="recipe") as caught:
            make()
        assert repr(bad) in str(caught.value)
