"""A recipe with fp8_dpa reaches attention; `status` and the report say what runs."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import Rule, convert, convert_back, status
from quaver.recipe import DelayedScaling, Float8CurrentScaling
from quaver.testing import launches
from tests.conversion.models import Mlp

FP8 = Float8CurrentScaling(fp8_dpa=True)
PLAIN = Float8CurrentScaling()
OTHER = Float8CurrentScaling(fp8_dpa=True, use_power_2_scales=True)
DELAYED = DelayedScaling(fp8_dpa=True, amax_history_len=4)


def layer(**options) -> qv.TransformerLayer:
    return qv.TransformerLayer(
        16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, **options
    ).requires_grad_(True)


def test_the_recipe_is_attached_and_the_attention_runs_in_fp8() -> None:
    model, x = nn.Sequential(layer()), torch.randn(2, 5, 16)
    twin = nn.Sequential(layer())
    twin.load_state_dict(model.state_dict())
    report = convert(model, FP8)
    attention = model[0].self_attention.core_attention
    assert attention.recipe == FP8
    (attached,) = report.attention
    assert (attached.name, attached.recipe) == ("0.self_attention.core_attention", FP8)
    assert attached.backend.startswith("reference (FP8 operands")
    assert "0.self_attention.core_attention" in str(report)
    with qv.autocast(recipe=FP8):
        expected = twin(x)
    assert torch.equal(model(x), expected)
    assert set(attention.recipe_states) == {"forward", "backward"}
    convert(twin, PLAIN)
    assert not torch.equal(twin(x), expected)  # that the attention makes a difference


def test_status_names_the_backend_and_whether_it_runs_in_fp8() -> None:
    model = nn.Sequential(layer())
    (found,) = status(model).attention
    assert (found.name, found.class_name) == (
        "0.self_attention.core_attention",
        "DotProductAttention",
    )
    assert (found.recipe, found.backend, found.calibrated) == (None, "sdpa", False)
    assert "high precision" in str(status(model))
    convert(model, DELAYED)
    (found,) = status(model).attention
    assert (found.recipe, found.scales_device, found.calibrated) == (DELAYED, None, False)
    assert found.backend.startswith("reference (FP8 operands are emulated")
    model(torch.randn(2, 5, 16)).sum().backward()
    (found,) = status(model).attention
    assert (found.scales_device, found.calibrated) == (torch.device("cpu"), True)
    text = str(status(model))
    for words in ("runs in", "FP8", "reference (FP8", "DelayedScaling: DelayedScaling("):
        assert words in text


def test_status_of_attention_alone() -> None:
    text = str(status(nn.Sequential(qv.DotProductAttention(2, 8))))
    assert text.startswith("No layer is Quaver's (0 are nn.Linear).\n")
    assert "sdpa" in text


def test_another_recipe_replaces_it_and_the_way_back_restores_it() -> None:
    model = layer(recipe=FP8)
    attention = model.self_attention.core_attention
    report = convert(model, PLAIN)
    assert attention.recipe is None
    assert [each.recipe for each in report.attention] == [None]
    convert(model, OTHER)
    assert attention.recipe == OTHER
    assert convert(model).attention == ()  # without a recipe nothing is attached or taken off
    assert attention.recipe == OTHER
    assert "self_attention.core_attention" in str(convert_back(model))
    assert attention.recipe == FP8
    assert convert(layer(), PLAIN).attention == ()


def test_rules_decide_about_attention_too() -> None:
    model = nn.Sequential(layer(), layer(), layer())
    report = convert(
        model, PLAIN, rules=[Rule("1.*", recipe=FP8), Rule("2.*attention", recipe=FP8, skip=False)]
    )
    recipes = [each.self_attention.core_attention.recipe for each in model]
    assert recipes == [None, FP8, FP8]
    assert len(report.attention) == 2
    report = convert(model, OTHER, exclude="0.*")
    assert model[0].self_attention.core_attention.recipe is None
    skipped = {each.name: each.reason for each in report.skipped}
    assert "excluded by" in skipped["0.self_attention.core_attention"]


def test_functions_of_users_are_asked_about_attention_only_where_it_matters() -> None:
    convert(layer(), PLAIN, include=lambda name, module: module.weight_names != ())


def test_an_attention_that_cannot_is_left_and_named() -> None:
    model = layer(attention=qv.AttentionOptions(backend="sdpa"))
    report = convert(model, FP8)
    assert model.self_attention.core_attention.recipe is None
    reasons = {each.name: each.reason for each in report.skipped}
    assert 'backend="sdpa" does not serve' in reasons["self_attention.core_attention"]
    assert any("fp8_dpa=True has no effect" in note for note in report.notes)


@pytest.mark.parametrize(("recipe", "said"), [(FP8, True), (PLAIN, False)])
def test_a_model_without_such_attention_says_so(recipe, said: bool) -> None:
    notes = convert(Mlp(), recipe).notes
    assert any("fp8_dpa=True has no effect here" in note for note in notes) == said


def test_an_error_leaves_the_attention_as_it_was(monkeypatch) -> None:
    model = layer()

    def fail(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("quaver.conversion.carry_out.quantize_weights", fail)
    with pytest.raises(RuntimeError, match="no"):
        convert(model, FP8)
    assert model.self_attention.core_attention.recipe is None


def test_on_another_device_it_follows_its_input(devices) -> None:
    model = layer(device=devices[1])
    convert(model, DELAYED)
    with launches() as log:
        model(torch.randn(2, 5, 16, device=devices[1])).sum().backward()
    assert {launch.device for launch in log} == {devices[1]}
    (found,) = status(model).attention
    assert found.scales_device == devices[1]
