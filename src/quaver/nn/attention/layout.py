"""The formats of attention's inputs: to heads first, [b, h, s, d], and back."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from quaver.functional.attention.masks import Tokens
from quaver.functional.sequences import lengths, pad, unpad
from quaver.tensors import Payload

FORMATS: Final = ("bshd", "sbhd", "thd")
PACKED_MASKS: Final = {
    "no_mask": "padding",
    "causal": "padding_causal",
    "causal_bottom_right": "padding_causal_bottom_right",
}
"""What a mask type means for packed sequences: each of them is masked on its own."""

Masks = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Lengths(NamedTuple):
    """The sequences of a batch, where they differ in length.

    Attributes:
        queries, keys: running totals of the lengths, integers [b + 1]; or None.
        longest_query, longest_key: the longest of them; None: read from the running totals, for
            which the host waits.
    """

    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    longest_query: int | None = None
    longest_key: int | None = None

    def longest(self) -> tuple[int, int]:
        """The longest query and key sequences."""
        if self.queries is None or self.keys is None:
            raise ValueError(
                'the format "thd" needs cu_seqlens_q and cu_seqlens_kv, the running totals of the '
                "lengths"
            )
        query, key = self.longest_query, self.longest_key
        if query is None:
            query = int(lengths(self.queries).max())
        if key is None:
            key = query if self.keys is self.queries else int(lengths(self.keys).max())
        return query, key


def check_forms(
    qkv_format: str, operands: tuple[torch.Tensor, ...], forms: tuple[tuple[int, int], ...]
) -> None:
    """Raise unless query, key and value have the heads and features of `forms`, and one dtype.

    Raises:
        ValueError: another shape.
        TypeError: another dtype than the query's, or one that is not of high precision.
    """
    dims = 3 if qkv_format == "thd" else 4
    dtype = operands[0].dtype
    for name, x, form in zip(("query", "key", "value"), operands, forms, strict=True):
        if x.dim() != dims or tuple(x.shape[-2:]) != form:
            raise ValueError(
                f"{name} must be {qkv_format} with {form[0]} heads of {form[1]} features, "
                f"not {tuple(x.shape)}"
            )
        if not x.is_floating_point() or x.element_size() == 1 or x.dtype != dtype:
            raise TypeError(
                "query, key and value must have one high-precision floating-point dtype, but "
                f"{name} is {x.dtype} beside {dtype}"
            )


def heads_first(
    x: torch.Tensor, qkv_format: str, cu_seqlens: torch.Tensor | None, longest: int
) -> torch.Tensor:
    """x in `qkv_format` as [b, h, s, d]; packed sequences are padded to the longest with zeros."""
    if qkv_format == "bshd":
        return x.transpose(1, 2)
    if qkv_format == "sbhd":
        return x.permute(1, 2, 0, 3)
    if cu_seqlens is None:
        raise ValueError('the format "thd" needs cu_seqlens')
    return pad(x, cu_seqlens, longest).transpose(1, 2)


def heads_last(
    x: torch.Tensor, qkv_format: str, cu_seqlens: torch.Tensor | None, tokens: int
) -> torch.Tensor:
    """x [b, h, s, d] as [b, s, h·d], [s, b, h·d] or [t, h·d]."""
    if qkv_format == "sbhd":
        return x.permute(2, 0, 1, 3).flatten(2)
    rows = x.transpose(1, 2).flatten(2)
    if qkv_format == "bshd":
        return rows
    if cu_seqlens is None:
        raise ValueError('the format "thd" needs cu_seqlens')
    return unpad(rows, cu_seqlens, tokens)


def payload_last(
    payload: Payload, qkv_format: str, cu_seqlens: torch.Tensor | None, tokens: int
) -> Payload:
    """`heads_last` of a payload, as bytes: FP8 tensors cannot be indexed everywhere."""
    data = heads_last(payload.data.view(torch.uint8), qkv_format, cu_seqlens, tokens)
    return payload._replace(data=data.view(payload.data.dtype))


def real_tokens(
    mask_type: str, masks: Masks, sequences: Lengths, shape: tuple[int, int, int]
) -> Tokens | None:
    """Which tokens of a padded batch are real; None where the mask type knows no padding.

    Args:
        masks: bool [b, 1, 1, s] or [b, s], True for padding; of queries and keys, or two of them.
        sequences: or running totals of the lengths, with the padding at the end.
        shape: b, sq and sk.

    Raises:
        ValueError: neither was given, one that the mask type takes no notice of, or a wrong shape.
    """
    batch, queries, keys = shape
    given = sequences.queries is not None or sequences.keys is not None
    if "padding" not in mask_type:
        if given:
            raise ValueError(f"attn_mask_type={mask_type} takes no cu_seqlens; padding masks do")
        return None
    if sequences.queries is not None and sequences.keys is not None:
        if masks is not None:
            raise ValueError("give attention_mask or cu_seqlens, not both")
        steps = torch.arange(max(queries, keys), device=sequences.queries.device)
        found = Tokens(
            steps[:queries] < lengths(sequences.queries)[:, None],
            steps[:keys] < lengths(sequences.keys)[:, None],
        )
    elif masks is None or given:
        raise ValueError(
            f"attn_mask_type={mask_type} needs attention_mask, True for padding, or both of "
            "cu_seqlens_q and cu_seqlens_kv"
        )
    else:
        pair = masks if isinstance(masks, tuple) else (masks, masks)
        for mask in pair:
            if mask.dtype != torch.bool:
                raise ValueError(f"attention_mask must be bool, True for padding, not {mask.dtype}")
        found = Tokens(*(~mask.reshape(mask.shape[0], mask.shape[-1]) for mask in pair))
    if found.queries.shape != (batch, queries) or found.keys.shape != (batch, keys):
        raise ValueError(
            f"the padding must be given for {batch} sequences of {queries} queries and {keys} "
            f"keys, not {tuple(found.queries.shape)} and {tuple(found.keys.shape)}"
        )
    return found


def arbitrary_mask(mask_type: str, masks: Masks) -> torch.Tensor | None:
    """The mask of "arbitrary"; None for the other types.

    Raises:
        ValueError: it is missing or no bool tensor; or another type that takes none was given one.
    """
    if mask_type == "arbitrary":
        if not isinstance(masks, torch.Tensor) or masks.dtype != torch.bool or masks.dim() != 4:
            raise ValueError(
                "attn_mask_type=arbitrary needs attention_mask, a bool tensor that broadcasts to "
                "[b, h, sq, sk], True where a key is masked out"
            )
        return masks
    if masks is not None and "padding" not in mask_type:
        raise ValueError(
            f"attn_mask_type={mask_type} takes no attention_mask; leave it out, or use the type "
            '"padding", "padding_causal" or "arbitrary"'
        )
    return None
