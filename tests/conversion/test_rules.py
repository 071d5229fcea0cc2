"""Which layers are converted: patterns, predicates, their order, and what matched nothing."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import ConversionError, Rule, convert
from quaver.recipe import DelayedScaling
from tests.conversion.models import Mlp


def blocks(count: int = 3) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(count)), "head": Mlp()})


def names(report: qv.conversion.ConversionReport) -> list[str]:
    return [layer.name for layer in report.converted]


def skips(report: qv.conversion.ConversionReport) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.skipped}


def test_lm_head_is_left_by_default_and_said_so():
    model = Mlp()
    report = convert(model)
    assert names(report) == ["fc1", "fc2"]
    assert type(model.lm_head) is nn.Linear
    assert skips(report) == {
        "lm_head": "excluded by 'lm_head' of the default; exclude=() converts it"
    }
    assert "lm_head" in str(report)
    assert "exclude=()" in str(report)
    assert report.unmatched_rules == ()


def test_a_nested_lm_head_is_left_too_and_is_converted_when_asked():
    report = convert(blocks(1))
    assert list(skips(report)) == ["layers.0.lm_head", "head.lm_head"]
    model = Mlp()
    assert names(convert(model, exclude=())) == ["fc1", "fc2", "lm_head"]
    assert isinstance(model.lm_head, qv.nn.Linear)


def test_default_patterns_that_match_nothing_are_not_reported():
    report = convert(nn.Sequential(nn.Linear(4, 4)))
    assert names(report) == ["0"]
    assert report.unmatched_rules == ()


def test_include_takes_globs_over_dots_and_predicates():
    assert names(convert(blocks(), include="layers.[02].*")) == [
        "layers.0.fc1", "layers.0.fc2", "layers.2.fc1", "layers.2.fc2",
    ]  # fmt: skip

    def is_wide(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and module.out_features == 32

    report = convert(blocks(1), include=[is_wide, "head.fc2"])
    assert names(report) == ["layers.0.fc1", "head.fc1", "head.fc2"]
    assert skips(report)["layers.0.fc2"] == "not among include"


def test_exclude_wins_over_include():
    report = convert(Mlp(), include="fc*", exclude="*2")
    assert names(report) == ["fc1"]
    assert skips(report) == {"fc2": "excluded by '*2'", "lm_head": "not among include"}


def test_patterns_match_whole_names_and_mind_case():
    report = convert(Mlp(), include=["fc", "FC1", "fc2"])
    assert names(report) == ["fc2"]
    assert [(rule.given_as, rule.match) for rule in report.unmatched_rules] == [
        ("include[0]", "'fc'"),
        ("include[1]", "'FC1'"),
    ]


def test_the_first_rule_that_matches_decides():
    special, usual = DelayedScaling(margin=1), DelayedScaling()
    model = blocks(2)
    rules = [
        Rule("layers.0.fc2", skip=True),
        Rule("layers.0.*", recipe=special),
        Rule("*.lm_head"),  # before the default exclude
    ]
    report = convert(model, usual, rules=rules)
    recipes = {layer.name: layer.recipe for layer in report.converted}
    assert recipes == {
        "layers.0.fc1": special,
        "layers.0.lm_head": special,
        "layers.1.fc1": usual,
        "layers.1.fc2": usual,
        "layers.1.lm_head": usual,
        "head.fc1": usual,
        "head.fc2": usual,
        "head.lm_head": usual,
    }
    assert model["layers"][0].fc1.recipe == special
    assert model["layers"][1].fc1.recipe == usual
    assert skips(report) == {"layers.0.fc2": "skipped by rules[0], 'layers.0.fc2'"}


def test_rules_that_decided_nothing_are_reported_with_why():
    def never(name: str, module: nn.Module) -> bool:
        return False

    rules = [Rule("fc*"), Rule("fc1", skip=True), Rule("encoder.*"), Rule(never, skip=True)]
    report = convert(Mlp(), rules=rules, exclude=["lm_head", "norm"])
    assert [(rule.given_as, rule.match, rule.matches) for rule in report.unmatched_rules] == [
        ("rules[1]", "'fc1'", "only layers that an earlier rule decides"),
        ("rules[2]", "'encoder.*'", "no layer that can be converted"),
        ("rules[3]", "never", "no layer that can be converted"),
        ("exclude[1]", "'norm'", "no layer that can be converted"),
    ]
    for words in ("rules[2]", "'encoder.*'", "no layer that can be converted"):
        assert words in str(report)


def test_a_shared_module_matches_by_each_of_its_names():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    report = convert(model, include="b")
    assert names(report) == ["a"]
    assert report.converted[0].note == "also b"
    assert isinstance(model["b"], qv.nn.Linear)
    assert convert(nn.ModuleDict({"a": shared, "b": shared}), exclude="b").converted == ()


def failing(name: str, module: nn.Module) -> bool:
    raise KeyError(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "fp8"}, 'weights must be "keep" or "quantize", not \'fp8\''),
        ({"recipe": "delayed"}, "recipe must be None or a recipe such as DelayedScaling"),
        ({"include": "layers.[0"}, r"must close each '\[' with a '\]'"),
        ({"exclude": [""]}, "a pattern must not be empty"),
        ({"include": 3}, "include must be a glob"),
        ({"include": [3]}, "layers are named by a glob"),
        ({"rules": ["fc1"]}, "rules must hold Rule objects"),
        ({"include": failing}, "predicate failing must .* for fc1 it raised KeyError: 'fc1'"),
    ],
)
def test_a_wrong_argument_is_one_clear_line_before_anything_changed(options, message):
    model = Mlp()
    with pytest.raises(ConversionError, match=message) as caught:
        convert(model, **options)
    assert "\n" not in str(caught.value)
    assert all(type(layer) is nn.Linear for layer in (model.fc1, model.fc2, model.lm_head))
    assert not model._forward_pre_hooks


def test_wrong_rules_and_models_are_refused():
    with pytest.raises(ConversionError, match="either skip layers or give them a recipe"):
        Rule("fc1", recipe=DelayedScaling(), skip=True)
    with pytest.raises(ConversionError, match="a rule's recipe must be a recipe"):
        Rule("fc1", recipe="delayed")
    with pytest.raises(ConversionError, match=r"model must be an nn\.Module, not Tensor"):
        convert(torch.zeros(2))


def test_an_empty_report_says_so():
    report = convert(nn.ReLU())
    assert report.converted == ()
    assert str(report) == "No layer was converted."
