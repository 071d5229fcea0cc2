"""Which backend computes an attention: explicit rules, no fallback from an explicit choice."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from quaver.errors import QuaverError

BACKENDS: Final = ("auto", "reference", "sdpa")


class Needs(NamedTuple):
    """What an attention asks of its backend.

    Attributes:
        quantized: FP8 operands, or their calibration.
        sink: another softmax than the plain one.
        bias: a bias is added to the scores.
        bias_grad: and its gradient is wanted.
        dtype: of the operands.
    """

    quantized: bool = False
    sink: bool = False
    bias: bool = False
    bias_grad: bool = False
    dtype: torch.dtype = torch.float32


class Backend(NamedTuple):
    """The backend of an attention.

    Attributes:
        name: "reference" or "sdpa".
        reason: why it is not sdpa; "" where it is, or where the reference was asked for.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def refusal(needs: Needs) -> str:
    """Why torch's scaled_dot_product_attention does not serve; "" if it does."""
    if needs.quantized:
        return "FP8 operands are emulated around the written-out attention"
    if needs.sink:
        return "scaled_dot_product_attention has no attention sinks"
    if needs.bias_grad:
        return "not every kernel of scaled_dot_product_attention gives the bias a gradient"
    if needs.bias and needs.dtype in (torch.bfloat16, torch.float16):
        return "scaled_dot_product_attention would round the bias to the inputs' dtype"
    return ""


def attention_backend(backend: str, needs: Needs) -> Backend:
    """The backend that computes what `needs` says.

    Args:
        backend: "auto" takes sdpa wherever it serves; "reference" or "sdpa" takes that one.

    Raises:
        ValueError: an unknown backend.
        QuaverError: "sdpa" does not serve; says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "reference":
        return Backend("reference")
    reason = refusal(needs)
    if backend == "sdpa" and reason:
        raise QuaverError(
            f'backend="sdpa" does not serve this attention: {reason}; pass backend="auto"'
        )
    return Backend("reference", reason) if reason else Backend("sdpa")
