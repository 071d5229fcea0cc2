"""The normalization of each head's queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from quaver.nn.attention.norms import NormKind
from quaver.nn.attention.options import QKNorm


class L2Normalization(nn.Module):
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32 arithmetic."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d] over its length, in its dtype."""
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        return (wide * (wide.square().sum(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


def head_norm(
    options: QKNorm | None,
    width: int,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> nn.Module | None:
    """The module that normalizes heads of `width` features; None where there is none."""
    if options is None:
        return None
    if options.normalization == "L2Normalization":
        return L2Normalization(options.eps)
    norm = NormKind(options.normalization, options.eps)
    return norm.make(width, device, dtype)
