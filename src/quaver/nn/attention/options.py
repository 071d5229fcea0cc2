"""Options of the attention modules, grouped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch

from quaver.functional.attention.masks import Window
from quaver.nn.random import RNGStatesTracker

Normalization = Literal["LayerNorm", "RMSNorm", "L2Normalization"]


@dataclass(frozen=True)
class QKNorm:
    """The normalization of each head's queries and keys.

    Args:
        normalization: "RMSNorm" or "LayerNorm", with parameters [d]; "L2Normalization" (x over its
            length) has none.
        eps: added to the mean square, the variance, or the square of the length.
        before_rope: whether it comes before the rotary position embedding; otherwise after.
    """

    normalization: Normalization = "RMSNorm"
    eps: float = 1e-6
    before_rope: bool = False

    def __post_init__(self) -> None:
        if self.normalization not in get_args(Normalization):
            raise ValueError(
                f"the normalization of queries and keys must be one of "
                f"{', '.join(get_args(Normalization))}, not {self.normalization!r}"
            )


@dataclass(frozen=True)
class AttentionOptions:
    """What `MultiheadAttention` can be told beside what users set daily.

    Args:
        kv_channels: features of a head; None: hidden_size / num_attention_heads.
        window_size, softmax_scale, softmax_type, backend: as for `DotProductAttention`.
        fuse_qkv_params: one weight for queries, keys and values, [q; k; v] along its rows (in cross
            attention one for keys and values); otherwise three.
        qk_norm: of queries and keys; None: none.
        rotary_interleaved: the pairs of the rotary position embedding are neighbouring features.
        get_rng_state_tracker: as for `DotProductAttention`.
    """

    kv_channels: int | None = None
    window_size: int | Window | None = None
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    backend: str = "auto"
    fuse_qkv_params: bool = True
    qk_norm: QKNorm | None = None
    rotary_interleaved: bool = False
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None = None


class AttentionInputs(TypedDict, total=False):
    """What `DotProductAttention.forward` takes beside its operands and the mask; as there."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    attn_mask_type: str | None
    core_attention_bias_type: str
    core_attention_bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
