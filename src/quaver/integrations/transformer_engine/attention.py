"""`transformer_engine.pytorch.DotProductAttention` and `MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from quaver import nn as native_modules
from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.base import TransformerEngineBaseModule
from quaver.integrations.transformer_engine.layernorm_linear import LayerNormLinear, LayerNormMLP
from quaver.integrations.transformer_engine.linear import Linear
from quaver.integrations.transformer_engine.options import (
    DeviceLike,
    InitMethod,
    RngTracker,
    WeightInit,
    chosen_device,
    refuse_parallel,
    refuse_unknown,
    transformer_engine_name,
    wgrad_options,
)
from quaver.nn import attention as native
from quaver.nn import checkpoint
from quaver.nn.attention.options import AttentionOptions, QKNorm
from quaver.nn.weights import QuantizedWeights

Window = tuple[int, int] | None


@transformer_engine_name("transformer_engine.pytorch.attention")
class DotProductAttention(TransformerEngineBaseModule, native.DotProductAttention):
    """quaver.nn.DotProductAttention with the options that scripts pass; sbhd unless told."""

    layer_number: int | None = None
    attention_type = "self"
    _dropout_tracker: RngTracker | None = None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        device: DeviceLike = None,
    ) -> None:
        refuse_unknown("DotProductAttention", locals())
        refuse_parallel("DotProductAttention", tp_group, tp_size)
        native.DotProductAttention.__init__(
            self,
            num_attention_heads,
            kv_channels,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            softmax_scale=softmax_scale,
            qkv_format=qkv_format,
            softmax_type=softmax_type,
            device=chosen_device(device),
        )
        self.layer_number = layer_number
        self.attention_type = attention_type
        self._dropout_tracker = get_rng_state_tracker

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        num_splits: int | None = 1,
    ) -> torch.Tensor:
        """As quaver.nn.DotProductAttention's."""
        given = locals()
        refuse_unknown("DotProductAttention.forward", given)
        refuse_change("DotProductAttention", "qkv_format", qkv_format, self.qkv_format)
        refuse_change("DotProductAttention", "window_size", window_size, self.window_size)
        if inference_params is not None:
            raise QuaverError("pass inference_params to MultiheadAttention, which keeps the cache")
        run: Callable[..., Any] = partial(super().forward, **core_inputs(given))
        operands = (query_layer, key_layer, value_layer, attention_mask)
        draws = self.training and self.attention_dropout > 0
        tracker = self._dropout_tracker if draws else None
        with nullcontext() if tracker is None else tracker().fork():
            attended: torch.Tensor = (
                checkpoint(run, *operands, get_rng_state_tracker=tracker)
                if checkpoint_core_attention
                else run(*operands)
            )
        return attended


@transformer_engine_name("transformer_engine.pytorch.attention")
class MultiheadAttention(native.MultiheadAttention):
    """quaver.nn.MultiheadAttention with the options that scripts pass; sbhd unless told."""

    layer_number: int | None = None

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: RngTracker | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: DeviceLike = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        given = locals()
        refuse_unknown("MultiheadAttention", given)
        refuse_parallel("MultiheadAttention", tp_group, tp_size)
        refuse_attention("MultiheadAttention", given)
        _init_multihead(self, given)
        self.layer_number = layer_number
        adopt(self, given)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """As quaver.nn.MultiheadAttention's."""
        given = locals()
        refuse_unknown("MultiheadAttention.forward", given)
        own = self.core_attention.window_size
        refuse_change("MultiheadAttention", "window_size", window_size, own)
        refuse_core_checkpoint("MultiheadAttention", checkpoint_core_attention)
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_output=encoder_output,
            rotary_pos_emb=rotary_pos_emb,
            inference_params=inference_params,
            is_first_microbatch=is_first_microbatch,
            **core_inputs(given),
        )


def _init_multihead(attention: MultiheadAttention, given: dict[str, Any]) -> None:
    norm = {
        "normalization": given["normalization"],
        "eps": given["layernorm_epsilon"],
        "zero_centered_gamma": given["zero_centered_gamma"],
    }
    kept = (
        *("num_gqa_groups", "attention_dropout", "attn_mask_type", "attention_type", "qkv_format"),
        *("bias", "input_layernorm", "return_layernorm_output"),
    )
    native.MultiheadAttention.__init__(
        attention,
        given["hidden_size"],
        given["num_attention_heads"],
        options=attention_options(given),
        device=chosen_device(given["device"]),
        dtype=given["params_dtype"],
        **{name: given[name] for name in kept},
        **(norm if given["input_layernorm"] else {}),
    )


def refuse_change(owner: str, name: str, value: Any, own: Any) -> None:
    """Raise where a call changes an option that the module was made with."""
    if value is not None and value != own:
        raise QuaverError(
            f"{owner} was made with {name}={own!r}; make another one for {name}={value!r}"
        )


def refuse_core_checkpoint(owner: str, checkpoint_core_attention: bool) -> None:
    """Raise where only the innermost part is to be recomputed."""
    if checkpoint_core_attention:
        raise QuaverError(
            f"checkpoint_core_attention=True is not taken by {owner}; call the whole of it through "
            "transformer_engine.pytorch.checkpoint"
        )


def refuse_attention(owner: str, given: dict[str, Any]) -> None:
    """Raise for the options of attention modules that have no counterpart."""
    if given.get("return_bias"):
        raise QuaverError(f"{owner}(return_bias=True) is not taken; the bias is added")
    if given["fuse_qkv_params"] and given["qkv_weight_interleaved"]:
        raise QuaverError(
            f"{owner} keeps a fused weight as [q; k; v]; pass qkv_weight_interleaved=False"
        )


def attention_options(given: dict[str, Any]) -> AttentionOptions:
    """The options of the native attention modules."""
    kind, norm = given.get("qk_norm_type"), None
    if kind is not None:
        norm = QKNorm(kind, given["qk_norm_eps"], given["qk_norm_before_rope"])
    return AttentionOptions(
        kv_channels=given["kv_channels"],
        window_size=given["window_size"],
        fuse_qkv_params=given["fuse_qkv_params"],
        qk_norm=norm,
    )


_CORE = (
    *("attn_mask_type", "core_attention_bias_type", "core_attention_bias", "alibi_slopes"),
    *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
)


def core_inputs(given: dict[str, Any]) -> Any:
    """What is handed on to the attention itself."""
    return {name: given[name] for name in _CORE if given.get(name) is not None}


def adopt(parent: nn.Module, given: dict[str, Any]) -> None:
    """Let the parts of an attention module or a layer be the shim's, too, drawn as it was told.

    Scripts look for the attributes of those on every part of a model.
    """
    tracker, fuses = given["get_rng_state_tracker"], given["fuse_wgrad_accumulation"]
    first = WeightInit(given["init_method"], tracker)
    last = WeightInit(given["output_layer_init_method"], tracker)
    for name, module in parent.named_modules():
        kind = _SHIMS.get(type(module))
        if kind is not None:
            module.__class__ = kind
        if isinstance(module, DotProductAttention):
            module._dropout_tracker = tracker
            continue
        if not isinstance(module, QuantizedWeights):
            continue
        init = last if name.rpartition(".")[2] == "proj" else first
        module._init_wgrad(wgrad_options(fuses, False))
        if isinstance(module, Linear):
            module._weight_init = init
            module.use_bias = module.bias is not None
        elif isinstance(module, LayerNormLinear | LayerNormMLP):
            module.init_method = init
        if isinstance(module, LayerNormMLP):
            module.output_layer_init_method = last
        module.reset_parameters()  # type: ignore[operator]


_SHIMS: dict[type, type] = {
    native_modules.Linear: Linear,
    native_modules.LayerNormLinear: LayerNormLinear,
    native_modules.LayerNormMLP: LayerNormMLP,
    native.DotProductAttention: DotProductAttention,
    native.MultiheadAttention: MultiheadAttention,
}
