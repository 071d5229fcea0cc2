"""The demo's metrics against values worked out by hand."""

import math

import pytest
import torch

from quaver.cli.demo.metrics import Comparison, compare, relative_error


def logits_of(*distributions: list[float]) -> torch.Tensor:
    """Logits of shape (1, n, vocabulary) for the given probabilities, each shifted."""
    rows = [torch.tensor(row).log() + 3.0 * at for at, row in enumerate(distributions)]
    return torch.stack(rows)[None]


LAST = [1 / 3, 1 / 3, 1 / 3]
FULL = logits_of([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], LAST)
FP8 = logits_of([0.25, 0.5, 0.25], [0.2, 0.6, 0.2], LAST)
IDS = torch.tensor([[2, 0, 1]])


def test_compare_gives_the_values_worked_out_by_hand() -> None:
    result = compare(FULL, FP8, IDS)
    assert result.tokens == 2
    # Position 0 predicts token 0, position 1 predicts token 1; the last predicts nothing.
    assert result.perplexity_full == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-6)
    assert result.perplexity_fp8 == pytest.approx((0.25 * 0.6) ** -0.5, rel=1e-6)
    assert result.perplexity_ratio == pytest.approx((0.4 / 0.15) ** 0.5, rel=1e-6)
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    second = 0.2 * math.log(0.5) + 0.8 * math.log(4 / 3)
    assert result.kl_mean == pytest.approx((first + second) / 2, rel=1e-5)
    assert result.top1_agreement == 0.5


def test_equal_logits_have_no_divergence() -> None:
    result = compare(FULL, FULL + 7.0, IDS)
    assert result.perplexity_ratio == pytest.approx(1.0, abs=1e-6)
    assert result.kl_mean == pytest.approx(0.0, abs=1e-6)
    assert result.top1_agreement == 1.0


def test_windows_are_joined_by_their_tokens() -> None:
    whole = compare(FULL, FP8, IDS)
    halves = compare(FULL[:, :2], FP8[:, :2], IDS[:, :2]) + compare(
        FULL[:, 1:], FP8[:, 1:], IDS[:, 1:]
    )
    assert halves.tokens == whole.tokens
    assert halves.nll_full == pytest.approx(whole.nll_full, rel=1e-6)
    assert halves.kl_mean == pytest.approx(whole.kl_mean, rel=1e-6)
    assert halves.agreed == whole.agreed


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    result = Comparison(tokens=1, nll_full=1.0, nll_fp8=1e4)
    assert result.perplexity_fp8 == math.inf
    assert result.perplexity_ratio == math.inf


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 9.0], [3.0, 4.0], 1.0),
        ([3.75, 5.0], [3.0, 4.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
    ],
)
def test_relative_error(value: list[float], reference: list[float], error: float) -> None:
    assert relative_error(torch.tensor(value), torch.tensor(reference)) == pytest.approx(error)


def test_relative_error_keeps_nan() -> None:
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([1.0])))
