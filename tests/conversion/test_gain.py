"""Predicted gains: the roofline, where it is measured, what skip_slow leaves."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import gain
from quaver.conversion.errors import ConversionError
from quaver.conversion.gain import Rates

H200 = Rates(
    high_precision=700e12,
    fp8=1250e12,
    bandwidth=4.2e12,
    high_precision_host=175e-6,
    fp8_host=300e-6,
)


class Caches:
    """Stands for the measured rates by device; another device is faster on the host."""

    def __init__(self) -> None:
        self.asked: list[torch.device] = []

    def get(self, device: torch.device) -> Rates:
        self.asked.append(device)
        return H200


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Caches:
    caches = Caches()
    monkeypatch.setattr(gain, "_rates", caches)
    monkeypatch.setattr(gain, "has_fp8_gemm", lambda device: True)
    return caches


def test_a_large_layer_gains_what_the_roofline_says() -> None:
    tokens, width, out = 16384, 8192, 8192
    flop = 6 * tokens * width * out
    casts = 4 * (tokens * width + width * out + tokens * out) / 4.2e12
    expected = (flop / 700e12) / (flop / 1250e12 + casts)
    assert H200.gain(tokens, width, out) == pytest.approx(expected)
    assert 1.6 < expected < 1.79


def test_a_small_layer_is_as_slow_as_its_host() -> None:
    assert H200.gain(32, 256, 256) == pytest.approx(175 / 300)


def test_the_report_has_the_gain_of_each_layer(measured: Caches, devices) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)).to(devices[1])
    report = qv.convert(model, qv.recipe.DelayedScaling(), tokens=32)
    assert [layer.gain for layer in report.converted] == [H200.gain(32, 64, 64)] * 2
    assert measured.asked == [devices[1]] * 2
    assert "0.58×" in str(report)


def test_slow_layers_are_left_and_said(measured: Caches) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4096, 4096, dtype=torch.bfloat16))
    assert H200.gain(8192, 64, 64) < 1 < H200.gain(8192, 4096, 4096)
    report = qv.convert(model, qv.recipe.DelayedScaling(), tokens=8192, skip_slow=True)
    assert [layer.name for layer in report.converted] == ["1"]
    assert type(model[0]) is nn.Linear
    (left,) = report.skipped
    assert left.name == "0"
    assert "times slower in FP8 at 8192 tokens" in left.reason


def test_where_fp8_is_emulated_there_is_no_gain_and_skip_slow_leaves_all() -> None:
    report = qv.convert(nn.Linear(8, 8), qv.recipe.DelayedScaling())
    assert report.converted[0].gain is None
    report = qv.convert(nn.Linear(8, 8), qv.recipe.DelayedScaling(), skip_slow=True)
    assert not report.converted
    assert "emulated on cpu" in report.skipped[0].reason


@pytest.mark.parametrize("tokens", [0, -1, 2.5, None])
def test_tokens_must_be_a_number_of_rows(tokens) -> None:
    with pytest.raises(ConversionError, match="tokens must be a number of rows"):
        qv.convert(nn.Linear(8, 8), tokens=tokens)
