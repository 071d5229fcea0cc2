"""Tables of reports: layers that differ in a number of their names only share a row."""

import pytest
from torch import nn

from quaver.conversion import Rule, convert, status
from quaver.conversion.table import gathered, render
from quaver.recipe import Float8CurrentScaling, MXFP8BlockScaling


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.0.up", "layers.1.up", "layers.2.up"], ["layers.0-2.up"]),
        (["layers.3.up", "layers.10.up", "layers.4.up"], ["layers.3-4,10.up"]),
        (["layers.0.up", "layers.0.down", "layers.1.up"], ["layers.0-1.up", "layers.0.down"]),
        (["0", "2", "head"], ["0,2", "head"]),
        ([f"l.{i}.e.{j}.up" for i in range(2) for j in range(3)], ["l.0-1.e.0-2.up"]),
        (["l.0.e.0.up", "l.0.e.1.up", "l.1.e.0.up"], ["l.0.e.0-1.up", "l.1.e.0.up"]),
        (["fc1", "fc2", "rules[0]", ""], ["fc1", "fc2", "rules[0]", ""]),
        ([], []),
    ],
)
def test_names_that_differ_in_one_number(names: list[str], expected: list[str]) -> None:
    assert [row[0] for row in gathered([(name, "cpu") for name in names])] == expected


def test_rows_that_differ_elsewhere_stay_apart() -> None:
    rows = [("l.0.up", "a:0"), ("l.1.up", "a:1"), ("l.2.up", "a:0"), ("l.3.up", "a:1")]
    assert gathered(rows) == [("l.0,2.up", "a:0"), ("l.1,3.up", "a:1")]


def test_a_deep_model_has_a_short_report() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(12))})
    rule = Rule("layers.7", recipe=MXFP8BlockScaling())
    report = convert(model, Float8CurrentScaling(), rules=[rule])
    for text in (str(report), str(status(model))):
        assert "12 layers" in text
        assert text.count("layers.") == 2
        assert "layers.0-6,8-11 " in text
        assert "layers.7 " in text


def test_words_stay_whole_in_a_table_that_is_wider_for_it() -> None:
    names = ["layers.0." + "x" * 40, "head"]
    words = ["Float8CurrentScaling", "LayerNormLinear", "float8_e4m3fn", "calibrated", "sim:0"]
    why = "because it is so " * 20
    rows = [(name, *words, why, *words) for name in names]
    text = render("title", ["layer", *"abcdefghijk"], rows)
    assert all(text.count(word) == 4 for word in words)
    assert {line[-1] for line in text.splitlines()[1:]} == set("┓┃┩│┘")
