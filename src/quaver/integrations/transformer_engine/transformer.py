"""`transformer_engine.pytorch.TransformerLayer`."""

from __future__ import annotations

from typing import Any

import torch

from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.attention import (
    Window,
    adopt,
    attention_options,
    core_inputs,
    refuse_attention,
    refuse_change,
    refuse_core_checkpoint,
)
from quaver.integrations.transformer_engine.options import (
    DeviceLike,
    InitMethod,
    RngTracker,
    chosen_device,
    refuse_parallel,
    refuse_unknown,
    transformer_engine_name,
)
from quaver.nn import transformer as native


@transformer_engine_name("transformer_engine.pytorch.transformer")
class TransformerLayer(native.TransformerLayer):
    """quaver.nn.TransformerLayer with the options that scripts pass; sbhd unless told."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: RngTracker | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: DeviceLike = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
    ) -> None:
        given = locals()
        self._refuse(given)
        _init_native(self, given)
        self.layer_number = layer_number
        adopt(self, given)

    @staticmethod
    def _refuse(given: dict[str, Any]) -> None:
        # The other options of userbuffers mean something with ub_tp_comm_overlap alone.
        owner = "TransformerLayer"
        refuse_unknown(owner, {"ub_tp_comm_overlap": given["ub_tp_comm_overlap"]})
        refuse_parallel(owner, given["tp_group"], given["tp_size"])
        refuse_attention(owner, given)
        if given["enc_dec_window_size"] not in (None, (-1, -1)):
            raise QuaverError(f"{owner}(enc_dec_window_size=...) is not taken; leave it None")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Accept a group of one process.

        Raises:
            QuaverError: it has more.
        """
        refuse_parallel("TransformerLayer", tp_group, 1)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: Window = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window = None,
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
    ) -> torch.Tensor:
        """As quaver.nn.TransformerLayer's."""
        given = {**locals(), "attn_mask_type": self_attn_mask_type}
        owner = "TransformerLayer"
        refuse_unknown(f"{owner}.forward", given)
        core = self.self_attention.core_attention
        refuse_change(owner, "window_size", window_size, core.window_size)
        made = self.options.enc_dec_attn_mask_type
        refuse_change(owner, "enc_dec_attn_mask_type", enc_dec_attn_mask_type, made)
        refuse_change(owner, "enc_dec_window_size", enc_dec_window_size, None)
        refuse_core_checkpoint(owner, checkpoint_core_attention)
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_output=encoder_output,
            enc_dec_attn_mask=enc_dec_attn_mask,
            rotary_pos_emb=rotary_pos_emb,
            inference_params=inference_params,
            is_first_microbatch=is_first_microbatch,
            **core_inputs(given),
        )


_LAYER_OPTIONS = (
    *("apply_residual_connection_post_layernorm", "output_layernorm", "parallel_attention_mlp"),
    *("drop_path_rate", "enc_dec_attn_mask_type"),
)


def _init_native(layer: TransformerLayer, given: dict[str, Any]) -> None:
    kept = (
        *("num_gqa_groups", "layer_type", "self_attn_mask_type", "attn_input_format"),
        *("hidden_dropout", "attention_dropout", "normalization", "zero_centered_gamma"),
        *("activation", "bias"),
    )
    native.TransformerLayer.__init__(
        layer,
        given["hidden_size"],
        given["ffn_hidden_size"],
        given["num_attention_heads"],
        eps=given["layernorm_epsilon"],
        attention=attention_options(given),
        options=native.LayerOptions(**{name: given[name] for name in _LAYER_OPTIONS}),
        device=chosen_device(given["device"]),
        dtype=given["params_dtype"],
        **{name: given[name] for name in kept},
    )
