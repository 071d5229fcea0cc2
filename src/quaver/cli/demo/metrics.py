"""How far one model's predictions are from another's: perplexity, KL divergence, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """Sums over predicted tokens; add two to join windows. All logarithms are natural."""

    tokens: int = 0
    nll_full: float = 0.0
    nll_fp8: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            tokens=self.tokens + other.tokens,
            nll_full=self.nll_full + other.nll_full,
            nll_fp8=self.nll_fp8 + other.nll_fp8,
            kl=self.kl + other.kl,
            agreed=self.agreed + other.agreed,
        )

    @property
    def perplexity_full(self) -> float:
        """e to the mean negative log-likelihood, in full precision."""
        return _exp(self.nll_full / self.tokens)

    @property
    def perplexity_fp8(self) -> float:
        """The same with the recipe."""
        return _exp(self.nll_fp8 / self.tokens)

    @property
    def perplexity_ratio(self) -> float:
        """The recipe's perplexity over full precision's."""
        return _exp((self.nll_fp8 - self.nll_full) / self.tokens)

    @property
    def kl_mean(self) -> float:
        """Mean KL(full || fp8) of the next-token distributions, in nats a token."""
        return self.kl / self.tokens

    @property
    def top1_agreement(self) -> float:
        """The share of tokens for which both models rank the same token first."""
        return self.agreed / self.tokens


def compare(full: torch.Tensor, fp8: torch.Tensor, ids: torch.Tensor) -> Comparison:
    """Compare two logits of shape (1, n, vocabulary) for the token ids of shape (1, n).

    Position i predicts token i + 1, so n - 1 positions count. Sums are taken in float64.
    """
    targets = ids[0, 1:, None]
    log_p = torch.log_softmax(full[0, :-1].float(), dim=-1)
    log_q = torch.log_softmax(fp8[0, :-1].float(), dim=-1)
    divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True)
    return Comparison(
        tokens=targets.numel(),
        nll_full=-_total(log_p.gather(1, targets)),
        nll_fp8=-_total(log_q.gather(1, targets)),
        kl=_total(divergence.sum(dim=-1)),
        agreed=int((log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum()),
    )


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``||value - reference|| / ||reference||`` in the Frobenius norm, float64; 0 for 0 / 0."""
    wanted = reference.double()
    distance = float(torch.linalg.vector_norm(value.double() - wanted))
    norm = float(torch.linalg.vector_norm(wanted))
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm


def _total(values: torch.Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
