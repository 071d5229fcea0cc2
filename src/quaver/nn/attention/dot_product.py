"""DotProductAttention: softmax(q k^T) v in every format, with every mask."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from quaver.devices import autocast_dtype, operands_device
from quaver.errors import RecipeError
from quaver.functional import handed_on
from quaver.functional.attention import (
    SOFTMAX_TYPES,
    AttentionPlan,
    Backend,
    Needs,
    Scores,
    attention_backend,
    reference_attention,
    sdpa_attention,
)
from quaver.functional.attention.masks import (
    Pattern,
    Window,
    allowed,
    is_plain_causal,
    window_of,
)
from quaver.functional.attention.quantize import BACKWARD_SLOTS, FORWARD_SLOTS
from quaver.nn.attention.bias import Bias
from quaver.nn.attention.layout import (
    FORMATS,
    PACKED_MASKS,
    Lengths,
    Masks,
    arbitrary_mask,
    check_forms,
    heads_first,
    heads_last,
    payload_last,
    real_tokens,
)
from quaver.nn.base import QuantizedModule
from quaver.nn.random import RNGStatesTracker
from quaver.recipe import Recipe
from quaver.scaling import backward_passes
from quaver.scaling.te_state import te_bytes
from quaver.tensors import Payload


class DotProductAttention(QuantizedModule):
    """softmax(scale · q k^T) v.

    Args:
        num_attention_heads: h, of the queries.
        kv_channels: features of a head, d; or (d of queries and keys, dv of values).
        num_gqa_groups: g, heads of keys and values, which divides h; None: h.
        attention_dropout: the probability with which an attention weight is dropped in training.
        attn_mask_type: "no_mask", "causal" (query i up to key i), "causal_bottom_right" (the last
            query up to the last key), "padding", "padding_causal", "padding_causal_bottom_right",
            or "arbitrary".
        window_size: a query attends to so many keys before and after its own; -1: all. The query's
            own key is the one on the diagonal: for "causal" and "padding_causal" the one of its
            index, for all others the one that many before the last.
        softmax_scale: multiplies q k^T; None: 1/sqrt(d).
        qkv_format: "bshd", "sbhd" or "thd" (packed sequences, with cu_seqlens).
        softmax_type: "vanilla"; "off-by-one" adds 1 to the denominator; "learnable" adds
            exp(softmax_offset), a parameter of each head.
        backend: "auto", "reference" or "sdpa". The reference is written out in float32; sdpa is
            torch's scaled_dot_product_attention. "auto" takes sdpa where it serves; `backend_for`
            says which runs.
        recipe: in force where no `autocast` names one; it must have fp8_dpa=True. Then Q, K, V, the
            attention's weights and its output are quantized, and the gradients of the output and of
            q k^T, each with a scale of this module's.
        get_rng_state_tracker: gives the tracker whose stream "model-parallel-rng" the dropout draws
            from, so that ranks with other heads drop others; None: from the default stream.
        device: of the parameter of "learnable"; everything else is on the input's device.

    Raises:
        ValueError, RecipeError: an option that does not fit.
    """

    softmax_offset: nn.Parameter | None
    slots_per_gemm: ClassVar[dict[str, int]] = {
        "forward": len(FORWARD_SLOTS),
        "backward": len(BACKWARD_SLOTS),
    }
    slot_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "forward": FORWARD_SLOTS,
        "backward": BACKWARD_SLOTS,
    }

    def __init__(  # noqa: PLR0913 - options that users know, all but two by keyword
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: int | Window | None = None,
        softmax_scale: float | None = None,
        qkv_format: str = "bshd",
        softmax_type: str = "vanilla",
        backend: str = "auto",
        recipe: Recipe | None = None,
        get_rng_state_tracker: Callable[[], RNGStatesTracker] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self._init_quantized(recipe)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.k_channels, self.v_channels = channels
        self.attention_dropout = attention_dropout
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.softmax_scale = 1.0 / math.sqrt(self.k_channels)
        if softmax_scale is not None:
            self.softmax_scale = softmax_scale
        self.qkv_format = qkv_format
        self.softmax_type = softmax_type
        self.backend = backend
        self.get_rng_state_tracker = get_rng_state_tracker
        self._check_options()
        offset = None
        if softmax_type == "learnable":
            offset = nn.Parameter(torch.empty(1, num_attention_heads, 1, 1, device=device))
        self.register_parameter("softmax_offset", offset)
        self.reset_parameters()

    def _check_options(self) -> None:
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        if heads < 1 or groups < 1 or heads % groups:
            raise ValueError(f"num_gqa_groups must divide the {heads} heads, but is {groups}")
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ValueError(
                f"attention_dropout must be from 0 to below 1, not {self.attention_dropout}"
            )
        if self.qkv_format not in FORMATS:
            raise ValueError(
                f"qkv_format must be one of {', '.join(FORMATS)}, not {self.qkv_format!r}"
            )
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(
                f"softmax_type must be one of {', '.join(SOFTMAX_TYPES)}, not {self.softmax_type!r}"
            )
        window_of(self.attn_mask_type, self.window_size)
        if self.recipe is not None and not self.recipe.fp8_dpa:
            raise RecipeError(
                "a recipe of DotProductAttention must have fp8_dpa=True, without which it would do "
                f"nothing; {type(self.recipe).__name__} was given without"
            )
        self.backend_for()

    def reset_parameters(self) -> None:
        """Let the learnable offset be 0."""
        if self.softmax_offset is not None:
            nn.init.zeros_(self.softmax_offset)

    # ---- which backend

    def backend_for(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        quantized: bool | None = None,
        bias: bool = False,
        bias_grad: bool = False,
    ) -> Backend:
        """The backend that computes this attention, and why it is not sdpa where it is not.

        Args:
            dtype: of the operands.
            quantized: whether a recipe with fp8_dpa is in force; None: if one is attached.
            bias: whether there is a bias or ALiBi.
            bias_grad: whether its gradient is wanted.

        Raises:
            QuaverError: the backend that was asked for does not serve.
        """
        needs = Needs(
            quantized=self.recipe is not None if quantized is None else quantized,
            sink=self.softmax_type != "vanilla",
            bias=bias,
            bias_grad=bias_grad,
            dtype=dtype,
        )
        return attention_backend(self.backend, needs)

    def _quantizes_with(self, recipe: Recipe) -> bool:
        return recipe.fp8_dpa

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` gave; it goes to the device where the module runs next.

        TransformerEngine's state, of other slots, is not taken: a warning says so.
        """
        if te_bytes(state) is not None:
            warnings.warn(
                "the FP8 attention state of a TransformerEngine checkpoint is passed over: its "
                "slots are other ones; scales are learnt anew",
                stacklevel=2,
            )
            return
        super().set_extra_state(state)

    def _refuse_lost_replica(self) -> None:
        """Nothing: most recipes leave this module alone, and the linear layers around it refuse."""

    # ---- forward

    def forward(  # noqa: PLR0913 - all but the operands and the mask by keyword
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Masks = None,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [b, sq, h, d], [sq, b, h, d] or [tq, h, d], by qkv_format.
            key: the same with sk and g heads.
            value: the same as key with dv features.
            attention_mask: bool, True where masked out. For "arbitrary" [b or 1, h or 1, sq, sk];
                for padding masks [b, 1, 1, s], or a pair of them for queries and keys.
            cu_seqlens_q, cu_seqlens_kv: integers [b + 1], running totals of the lengths: for "thd",
                or in place of attention_mask with padding at the end.
            max_seqlen_q, max_seqlen_kv: at least the longest lengths of "thd"; None: the host reads
                them from cu_seqlens, which torch.compile does not trace.
            attn_mask_type: in place of the module's own.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" (before or
                after softmax_scale) or "alibi".
            core_attention_bias: [b or 1, h or 1, sq, sk].
            alibi_slopes: [h] or [b, h]; None: those of the paper.

        Returns:
            [b, sq, h·dv], [sq, b, h·dv] or [tq, h·dv], in the dtype of the inputs or of
            `torch.autocast`. Queries that may attend to no key give 0. In FP8 by a recipe with
            fp8_mha, a Float8Tensor.

        Raises:
            DeviceMismatchError: two tensors lie on two devices.
            ValueError: shapes or options that do not fit.
            QuaverError: the backend that was asked for does not serve.
        """
        query = self.prepare_forward(query)
        try:
            masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,)
            self._check_inputs(
                (query, key, value, self.softmax_offset),
                (cu_seqlens_q, cu_seqlens_kv, core_attention_bias, alibi_slopes, *masks),
            )
            sequences = Lengths(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
            bias = Bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
            bias.check()
            mask_type = attn_mask_type or self.attn_mask_type
            return self._attend((query, key, value), attention_mask, mask_type, sequences, bias)
        finally:
            self.end_forward()

    def _attend(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        masks: Masks,
        mask_type: str,
        sequences: Lengths,
        bias: Bias,
    ) -> torch.Tensor:
        form, tokens, device = self.qkv_format, operands[0].shape[0], operands[0].device
        longest = (0, 0)
        if form == "thd":
            if masks is not None or mask_type == "arbitrary":
                raise ValueError('the format "thd" takes no attention_mask; cu_seqlens says all')
            mask_type = PACKED_MASKS.get(mask_type, mask_type)
            longest = sequences.longest()
        elif sequences.longest_query is not None or sequences.longest_key is not None:
            raise ValueError(f'max_seqlen_q and max_seqlen_kv belong to "thd", not to "{form}"')
        dtype = autocast_dtype(device.type) or operands[0].dtype
        query = heads_first(operands[0].to(dtype), form, sequences.queries, longest[0])
        key, value = (
            heads_first(x.to(dtype), form, sequences.keys, longest[1]) for x in operands[1:]
        )
        if key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                "query, key and value must be of one batch, key and value of one length, not "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} (heads first)"
            )
        sizes = (query.shape[2], key.shape[2])
        pattern = Pattern(
            mask_type,
            window_of(mask_type, self.window_size),
            sizes,
            device,
            real_tokens(mask_type, masks, sequences, (query.shape[0], *sizes)),
            arbitrary_mask(mask_type, masks),
        )
        scores = self._scores(pattern, bias.values(pattern, query.shape[1], self.softmax_scale))
        out, payload = self._compute(query, key, value, scores)
        y = heads_last(out, form, sequences.queries, tokens)
        if payload is None:
            return y
        return handed_on(y, payload_last(payload, form, sequences.queries, tokens))

    def _compute(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, Payload | None]:
        """The output [b, h, sq, dv] of operands with heads first, and its payload to hand on."""
        plan = self._plan()
        bias = scores.bias
        backend = self.backend_for(
            query.dtype,
            quantized=plan is not None,
            bias=bias is not None,
            bias_grad=bias is not None and bias.requires_grad,
        )
        # The backends say themselves what they round, whatever torch.autocast would.
        device_type = query.device.type
        on = autocast_dtype(device_type) is not None
        autocast = torch.autocast(device_type, enabled=False) if on else nullcontext()
        with autocast, self._dropout_stream(scores):
            if backend.name == "sdpa":
                return sdpa_attention(query, key, value, scores), None
            return reference_attention(query, key, value, scores, plan)

    def _dropout_stream(self, scores: Scores) -> AbstractContextManager[None]:
        if self.get_rng_state_tracker is None or scores.dropout == 0:
            return nullcontext()
        return self.get_rng_state_tracker().fork()

    def _scores(self, pattern: Pattern, bias: torch.Tensor | None) -> Scores:
        sink: torch.Tensor | None = self.softmax_offset
        if self.softmax_type == "off-by-one":
            sink = torch.zeros(self.num_attention_heads, device=pattern.device)
        causal = bias is None and is_plain_causal(pattern)
        return Scores(
            self.softmax_scale,
            allowed=None if causal else allowed(pattern),
            causal=causal,
            bias=bias,
            sink=sink,
            dropout=self.attention_dropout if self.training else 0.0,
        )

    def _plan(self) -> AttentionPlan | None:
        call = self.current_call()
        if call.recipe is None:
            return None
        if call.recipe.fp8_mha and torch.compiler.is_compiling():
            raise RecipeError(
                "torch.compile cannot trace fp8_mha=True, whose outputs are Float8Tensors; compile "
                "with fp8_dpa alone"
            )
        return AttentionPlan(
            self.recipe_states["forward"],
            self.recipe_states["backward"],
            bool(call.record),
            call.again,
            backward_passes(),
            call.outer,
            calibrating=not call.quantized,
            gradients=call.recipe.backward_override is None,
            hands_on=call.recipe.fp8_mha,
        )

    def _check_inputs(self, operands: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        """Raise unless all tensors lie on one device and the operands have the right form."""
        names = ("query", "key", "value", "softmax_offset")
        if not torch.compiler.is_compiling():
            rest = ("cu_seqlens_q", "cu_seqlens_kv", "core_attention_bias", "alibi_slopes")
            mask_names = ["attention_mask"] * (len(others) - len(rest))
            operands_device((*names, *rest, *mask_names), (*operands, *others))
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        forms = ((heads, self.k_channels), (groups, self.k_channels), (groups, self.v_channels))
        check_forms(self.qkv_format, operands[:3], forms)

    def extra_repr(self) -> str:
        """What distinguishes it, for `repr`."""
        return (
            f"{self.num_attention_heads}, {(self.k_channels, self.v_channels)}, "
            f"num_gqa_groups={self.num_gqa_groups}, "
            f"attn_mask_type={self.attn_mask_type}, qkv_format={self.qkv_format}"
        )
