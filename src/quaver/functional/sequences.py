"""Sequences of different lengths in one tensor: packed one after the other, or padded.

`cu_seqlens` is int32 or int64 [b + 1], the running total of the lengths, beginning with 0; tokens
past its last entry belong to no sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenPlaces(NamedTuple):
    """Where each packed token stands.

    Attributes:
        sequence: int64 [t], the number of its sequence; of tokens past the last one, the last.
        position: int64 [t], counted within its sequence.
        inside: bool [t], whether it belongs to a sequence at all.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    inside: torch.Tensor


def lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The lengths of the sequences, int64 [b]."""
    return cu_seqlens.diff().long()


def token_places(cu_seqlens: torch.Tensor, tokens: int) -> TokenPlaces:
    """The places of `tokens` packed tokens, on the device of `cu_seqlens`."""
    ends = cu_seqlens[1:].long().contiguous()
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, index, right=True)
    inside = sequence < ends.shape[0]
    sequence = sequence.clamp(max=ends.shape[0] - 1)
    return TokenPlaces(sequence, index - cu_seqlens.long()[sequence], inside)


def pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Packed tokens [t, ...] as [b, longest, ...]; what no token fills is 0."""
    places = torch.arange(longest, device=packed.device)
    index = cu_seqlens[:-1].long()[:, None] + places
    filled = places < lengths(cu_seqlens)[:, None]
    if packed.shape[0] == 0:
        return packed.new_zeros(*index.shape, *packed.shape[1:])
    padded = packed[index.clamp(max=packed.shape[0] - 1)]
    return padded.masked_fill(~filled.view(*filled.shape, *[1] * (packed.dim() - 1)), 0)


def unpad(padded: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """[b, longest, ...] as packed tokens [tokens, ...]; those of no sequence are 0."""
    if 0 in padded.shape[:2]:
        return padded.new_zeros(tokens, *padded.shape[2:])
    places = token_places(cu_seqlens, tokens)
    rows = padded[places.sequence, places.position.clamp(max=padded.shape[1] - 1)]
    return rows.masked_fill(~places.inside.view(-1, *[1] * (rows.dim() - 1)), 0)
