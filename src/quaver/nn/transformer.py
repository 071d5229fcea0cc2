"""TransformerLayer: attention, in a decoder attention to an encoder, and an MLP."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional

from quaver.nn.attention import AttentionOptions, InferenceParams, MultiheadAttention
from quaver.nn.attention.layout import Masks
from quaver.nn.attention.multihead import Rotary
from quaver.nn.attention.norms import NormKind
from quaver.nn.attention.options import AttentionInputs
from quaver.nn.init import InitMethod
from quaver.nn.layernorm_mlp import LayerNormMLP
from quaver.nn.torch_names import rename_layer
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import Recipe


@dataclass(frozen=True)
class LayerOptions:
    """How the parts of a `TransformerLayer` are put together.

    Args:
        apply_residual_connection_post_layernorm: what is added to a part's output is that part's
            normed input; otherwise its input.
        output_layernorm: norm the layer's output, and not the input of self attention.
        parallel_attention_mlp: attention and MLP both take the layer's input, and their outputs are
            added to it together; of an encoder.
        drop_path_rate: the probability with which a part's output is left out for a sequence of the
            batch, in training; not in the format "thd".
        enc_dec_attn_mask_type: the mask type of the attention to the encoder.
    """

    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    parallel_attention_mlp: bool = False
    drop_path_rate: float = 0.0
    enc_dec_attn_mask_type: str = "no_mask"

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise ValueError(f"drop_path_rate must be from 0 to below 1, not {self.drop_path_rate}")
        if self.parallel_attention_mlp and self.apply_residual_connection_post_layernorm:
            raise ValueError(
                "parallel_attention_mlp adds to the layer's own input; leave "
                "apply_residual_connection_post_layernorm False"
            )


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added.

    Args:
        hidden_size: features of a token.
        ffn_hidden_size: features between the MLP's two linear layers.
        num_attention_heads: h.
        num_gqa_groups: heads of keys and values; None: h.
        layer_type: "encoder"; "decoder" attends to `encoder_output` too, between the two.
        self_attn_mask_type, attn_input_format: as attn_mask_type and qkv_format of
            `DotProductAttention`.
        hidden_dropout: on what is added; attention_dropout: on the attention's weights.
        normalization, eps, zero_centered_gamma: of all norms, as for `LayerNormLinear`.
        activation: of the MLP, as for `LayerNormMLP`.
        bias: whether the linear layers have biases.
        attention: further options of the attention.
        options: how the parts are put together.
        recipe: of all parts; in force where no `autocast` names one.
        device, dtype: of the parameters.
        init_method: fills the weights of the projections of queries, keys and values, and the MLP's
            first, in place, and their biases begin with zeros; None: as torch.nn.Linear.
        output_layer_init_method: the same for the weights whose outputs are added to the layer's.
        wgrad: where the weights' gradients go and when; None: to autograd, at once.

    The state_dict of a torch.nn.TransformerEncoderLayer, or of a decoder's, loads, too. It does not
    say how that layer was made: this one stands for one with norm_first=True, and with
    LayerOptions(output_layernorm=True, apply_residual_connection_post_layernorm=True) for one with
    norm_first=False. "gelu" is torch's of approximate="tanh".

    Raises:
        ValueError, QuaverError: an option that does not fit.
    """

    inter_attention: MultiheadAttention | None
    layernorm: nn.Module | None

    def __init__(  # noqa: PLR0913 - options that users know, all but three by keyword
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        layer_type: str = "encoder",
        self_attn_mask_type: str = "causal",
        attn_input_format: str = "bshd",
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        bias: bool = True,
        attention: AttentionOptions | None = None,
        options: LayerOptions | None = None,
        recipe: Recipe | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        wgrad: WgradOptions | None = None,
    ) -> None:
        super().__init__()
        self.options = options = options or LayerOptions()
        self.layer_type = layer_type
        self.attn_input_format = attn_input_format
        self.hidden_dropout = hidden_dropout
        self._check_options()
        norms: dict[str, Any] = asdict(NormKind(normalization, eps, zero_centered_gamma))
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        draws = {"init_method": init_method, "output_layer_init_method": output_layer_init_method}
        common: dict[str, Any] = {"bias": bias, "recipe": recipe, "wgrad": wgrad, **draws, **place}
        heads: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "num_gqa_groups": num_gqa_groups,
            "attention_dropout": attention_dropout,
            "qkv_format": attn_input_format,
            "options": attention,
            **common,
        }
        post = options.apply_residual_connection_post_layernorm
        normed: dict[str, Any] = norms | {"input_layernorm": True, "return_layernorm_output": post}
        own: dict[str, Any] = {} if options.output_layernorm else dict(normed)
        own["attn_mask_type"] = self_attn_mask_type
        self.self_attention = MultiheadAttention(**own, **heads)
        self.inter_attention = None
        if layer_type == "decoder":
            kind = options.enc_dec_attn_mask_type
            normed |= {"attention_type": "cross", "attn_mask_type": kind}
            self.inter_attention = MultiheadAttention(**normed, **heads)
        mlp: dict[str, Any] = {"activation": activation, "return_layernorm_output": post}
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **mlp, **norms, **common)
        last = NormKind(**norms).make(hidden_size, **place)
        self.layernorm = last if options.output_layernorm else None

    def _check_options(self) -> None:
        options = self.options
        if self.layer_type not in ("encoder", "decoder"):
            raise ValueError(f'layer_type must be "encoder" or "decoder", not {self.layer_type!r}')
        if not 0.0 <= self.hidden_dropout < 1.0:
            raise ValueError(f"hidden_dropout must be from 0 to below 1, not {self.hidden_dropout}")
        if options.parallel_attention_mlp and self.layer_type == "decoder":
            raise ValueError('parallel_attention_mlp needs layer_type="encoder", not "decoder"')
        if options.drop_path_rate and self.attn_input_format == "thd":
            raise ValueError(
                "drop_path_rate must be 0 in the format thd, which has no dimension for the batch, "
                f"not {options.drop_path_rate}"
            )
        if self.layer_type == "encoder" and options.enc_dec_attn_mask_type != "no_mask":
            raise ValueError(
                'enc_dec_attn_mask_type needs layer_type="decoder"; an encoder was given '
                f"{options.enc_dec_attn_mask_type!r}"
            )

    def _norm_prefixes(self) -> list[str]:
        """What the names of the norms' parameters begin with, in the order of the forward."""
        found = []
        for name in ("self_attention", "inter_attention"):
            attention = getattr(self, name)
            norm = None if attention is None else attention.norm_prefix()
            found += [] if norm is None else [f"{name}.{norm}"]
        last = [] if self.layernorm is None else ["layernorm."]
        return [*found, "layernorm_mlp.layer_norm_", *last]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rename_layer(state_dict, prefix, self._norm_prefixes())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Masks = None,
        *,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Masks = None,
        rotary_pos_emb: Rotary = None,
        inference_params: InferenceParams | None = None,
        is_first_microbatch: bool | None = None,
        self_attn_mask_type: str | None = None,
        **core: Unpack[AttentionInputs],
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            hidden_states: [b, s, hidden_size], [s, b, hidden_size] or [t, hidden_size].
            attention_mask: of self attention, as for `DotProductAttention`.
            encoder_output: in the form of hidden_states; of a decoder.
            enc_dec_attn_mask: of the attention to the encoder.
            rotary_pos_emb, inference_params: of self attention, as for `MultiheadAttention`.
            is_first_microbatch: as for `Linear`.
            self_attn_mask_type: in place of the layer's own.
            **core: what `DotProductAttention` takes besides, of self attention. The lengths of a
                decoder (cu_seqlens_q, cu_seqlens_kv and the longest) are its own and the encoder's.

        Returns:
            The form of hidden_states.

        Raises:
            ValueError: inputs that do not fit.
        """
        own, to_encoder = self._lengths(core)
        if self_attn_mask_type is not None:
            own = {**own, "attn_mask_type": self_attn_mask_type}
        parts = self.self_attention(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            inference_params=inference_params,
            is_first_microbatch=is_first_microbatch,
            **own,
        )
        if self.options.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden_states, is_first_microbatch)
            return self._output(self._added(parts + mlp, hidden_states))
        x = self._added(parts, hidden_states)
        if self.inter_attention is not None:
            parts = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output=encoder_output,
                is_first_microbatch=is_first_microbatch,
                **to_encoder,
            )
            x = self._added(parts, x)
        elif encoder_output is not None or enc_dec_attn_mask is not None:
            raise ValueError('encoder_output and its mask need layer_type="decoder", not "encoder"')
        return self._output(self._added(self.layernorm_mlp(x, is_first_microbatch), x))

    def backward_dw(self) -> None:
        """Compute the weights' gradients that `delay_wgrad_compute` has put off, the last first."""
        self.layernorm_mlp.backward_dw()
        if self.inter_attention is not None:
            self.inter_attention.backward_dw()
        self.self_attention.backward_dw()

    def _lengths(self, core: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
        """What self attention takes, and the attention to the encoder."""
        if self.inter_attention is None:
            return core, {}
        own = core.copy()
        to_encoder: AttentionInputs = {}
        if "cu_seqlens_q" in core or "cu_seqlens_kv" in core:
            queries, longest = core.get("cu_seqlens_q"), core.get("max_seqlen_q")
            own["cu_seqlens_kv"], own["max_seqlen_kv"] = queries, longest
            to_encoder["cu_seqlens_q"], to_encoder["max_seqlen_q"] = queries, longest
            to_encoder["cu_seqlens_kv"] = core.get("cu_seqlens_kv")
            to_encoder["max_seqlen_kv"] = core.get("max_seqlen_kv")
        return own, to_encoder

    def _added(self, parts: Any, x: torch.Tensor) -> torch.Tensor:
        """A part's output, or a pair of it and its normed input, added to what it belongs to."""
        out, residual = parts if isinstance(parts, tuple) else (parts, x)
        if self.training:
            out = functional.dropout(out, self.hidden_dropout)
            out = self._dropped_path(out)
        total: torch.Tensor = residual + out
        return total

    def _dropped_path(self, out: torch.Tensor) -> torch.Tensor:
        """Leave the output out for some sequences of the batch; the others make up for it."""
        rate = self.options.drop_path_rate
        if rate == 0:
            return out
        batch = 0 if self.attn_input_format == "bshd" else 1
        shape = [out.shape[i] if i == batch else 1 for i in range(out.dim())]
        kept = torch.rand(shape, device=out.device) >= rate
        return out * kept / (1 - rate)

    def _output(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.layernorm is None else self.layernorm(x)
