"""Attention written out: the reference for every mask, bias and sink, on every device."""

from __future__ import annotations

import torch
from torch.nn import functional

from quaver.functional.attention.quantize import (
    GRAD_OUTPUT,
    GRAD_SCORE,
    KEY,
    QUERY,
    VALUE,
    WEIGHT,
    AttentionPlan,
    quantized,
    quantized_gradient,
    quantized_output,
)
from quaver.functional.attention.scores import Scores
from quaver.tensors import Payload


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    plan: AttentionPlan | None = None,
) -> tuple[torch.Tensor, Payload | None]:
    """softmax(scale · q k^T + bias) v, in float32, rounded once at the end.

    Args:
        q: [b, h, sq, d].
        k: [b, g, sk, d], where g divides h; each of its heads serves h / g of q's.
        v: [b, g, sk, dv].
        scores: masks, bias and the rest.
        plan: how the operands are quantized; None: they are not.

    Returns:
        [b, h, sq, dv] in q's dtype. A query that may attend to no key gives 0, as does its
        gradient. And its FP8 payload of that shape, if the plan hands it on.
    """
    dtype = torch.promote_types(torch.float32, q.dtype)
    shared = q.shape[1] // k.shape[1]
    query = quantized(q.to(dtype), QUERY, plan)
    key = quantized(k.to(dtype), KEY, plan).repeat_interleave(shared, 1)
    value = quantized(v.to(dtype), VALUE, plan).repeat_interleave(shared, 1)
    products = quantized_gradient(query @ key.mT, GRAD_SCORE, plan)
    weights = _softmax(products * scores.scale, scores)
    if scores.dropout > 0:
        weights = functional.dropout(weights, scores.dropout)
    weights = quantized(weights, WEIGHT, plan)
    values, payload = quantized_output(weights @ value, plan)
    return quantized_gradient(values, GRAD_OUTPUT, plan).to(q.dtype), payload


def _softmax(x: torch.Tensor, scores: Scores) -> torch.Tensor:
    if scores.bias is not None:
        x = x + scores.bias
    allowed = scores.allowed
    if scores.causal:
        allowed = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    empty = None
    if allowed is not None:
        if scores.sink is None:  # a row without any score would be NaN, and so would its gradient
            empty = ~allowed.any(-1, keepdim=True)
            allowed = allowed | empty
        x = x.masked_fill(~allowed, float("-inf"))
    if scores.sink is None:
        weights = x.softmax(-1)
    else:
        sink = scores.sink.to(x.dtype).view(1, -1, 1, 1).expand(*x.shape[:-1], 1)
        weights = torch.cat((x, sink), dim=-1).softmax(-1)[..., :-1]
    return weights if empty is None else weights.masked_fill(empty, 0.0)
