"""Attention by torch's scaled_dot_product_attention, with the kernels that it has for a device."""

from __future__ import annotations

import torch
from torch.nn import functional

from quaver.functional.attention.scores import Scores


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """As `reference_attention`, for what `backends.refusal` has nothing against."""
    allowed, empty = scores.allowed, None
    shared = q.shape[1] // k.shape[1]
    if allowed is not None:
        # Kernels differ in what they make of a row without any key: let it have all, drop it after.
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | empty
        if shared > 1:  # with a mask, fewer kernels take grouped heads than take whole ones
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            shared = 1
    mask = allowed
    if scores.bias is not None:
        mask = scores.bias.to(q.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, float("-inf"))
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=scores.dropout,
        is_causal=scores.causal and mask is None,
        scale=scores.scale,
        enable_gqa=shared > 1,
    )
    return out if empty is None else out.masked_fill(empty, 0.0)
