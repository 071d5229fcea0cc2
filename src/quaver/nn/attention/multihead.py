"""MultiheadAttention: projections around DotProductAttention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Unpack

import torch
from torch import nn

from quaver.functional.rope import angle_tables, turn
from quaver.nn.attention.dot_product import DotProductAttention
from quaver.nn.attention.head_norm import head_norm
from quaver.nn.attention.inference import InferenceParams
from quaver.nn.attention.layout import Masks
from quaver.nn.attention.norms import NormKind
from quaver.nn.attention.options import AttentionInputs, AttentionOptions
from quaver.nn.init import InitMethod
from quaver.nn.layernorm_linear import LayerNormLinear
from quaver.nn.linear import Linear
from quaver.nn.torch_names import rename_attention
from quaver.nn.weights import QuantizedWeights
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import Recipe

Rotary = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class MultiheadAttention(nn.Module):
    """Attention between tokens of hidden_size features: projections, attention, projection.

    Args:
        hidden_size: features of a token.
        num_attention_heads: h.
        num_gqa_groups: g, heads of keys and values; None: h.
        attention_dropout, attn_mask_type, qkv_format: as for `DotProductAttention`.
        attention_type: "self", or "cross", whose keys and values come from `encoder_output`.
        bias: whether the projections have biases.
        input_layernorm: normalize hidden_states first (not encoder_output), by `normalization`,
            "LayerNorm" or "RMSNorm", `eps` and `zero_centered_gamma` (1 + weight multiplies).
        return_layernorm_output: return what `input_layernorm` gives, too.
        return_bias: leave the last projection's bias out, and return it, too.
        options: the rest.
        recipe: of the projections, and of the attention itself if it has fp8_dpa; in force where no
            `autocast` names one.
        device, dtype: of the parameters.
        init_method: fills the weights of the projections of queries, keys and values in place, and
            their biases begin with zeros; None: as torch.nn.Linear.
        output_layer_init_method: the same for the last projection.
        wgrad: where the weights' gradients go and when; None: to autograd, at once.

    The state_dict of a torch.nn.MultiheadAttention loads, too, if it has as many features.

    Raises:
        ValueError, RecipeError: an option that does not fit.
    """

    def __init__(  # noqa: PLR0913 - options that users know, all but two by keyword
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        attention_type: str = "self",
        qkv_format: str = "bshd",
        bias: bool = True,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        options: AttentionOptions | None = None,
        recipe: Recipe | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        wgrad: WgradOptions | None = None,
    ) -> None:
        super().__init__()
        self.options = options = options or AttentionOptions()
        self.attention_type = attention_type
        self.qkv_format = qkv_format
        self.input_layernorm = input_layernorm
        self.return_layernorm_output = return_layernorm_output
        self.return_bias = return_bias
        norm = NormKind(normalization, eps, zero_centered_gamma)
        self._check_options(hidden_size, num_attention_heads, norm)
        self.channels = options.kv_channels or hidden_size // num_attention_heads
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.channels,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            attn_mask_type=attn_mask_type,
            window_size=options.window_size,
            softmax_scale=options.softmax_scale,
            qkv_format=qkv_format,
            softmax_type=options.softmax_type,
            backend=options.backend,
            get_rng_state_tracker=options.get_rng_state_tracker,
            recipe=recipe if recipe is not None and recipe.fp8_dpa else None,
            device=device,
        )
        queries = num_attention_heads * self.channels
        keys = self.core_attention.num_gqa_groups * self.channels
        self.widths = {"query": queries, "key": keys, "value": keys}
        place: dict[str, Any] = {"device": device, "dtype": dtype, "recipe": recipe, "wgrad": wgrad}
        self._add_projections(hidden_size, bias, norm, {**place, "init_method": init_method})
        self.q_norm = head_norm(options.qk_norm, self.channels, device, dtype)
        self.k_norm = head_norm(options.qk_norm, self.channels, device, dtype)
        last: dict[str, Any] = {"init_method": output_layer_init_method, "return_bias": return_bias}
        self.proj = Linear(queries, hidden_size, bias, **last, **place)

    def _check_options(self, hidden_size: int, heads: int, norm: NormKind) -> None:
        if self.attention_type not in ("self", "cross"):
            raise ValueError(
                f'attention_type must be "self" or "cross", not {self.attention_type!r}'
            )
        if heads < 1:
            raise ValueError(f"num_attention_heads must be at least 1, not {heads}")
        if self.options.kv_channels is None and hidden_size % heads:
            raise ValueError(
                f"hidden_size must be a multiple of the {heads} heads, or kv_channels be given; "
                f"hidden_size is {hidden_size}"
            )
        if not self.input_layernorm and (self.return_layernorm_output or norm != NormKind()):
            raise ValueError(
                "normalization, eps, zero_centered_gamma and return_layernorm_output belong to "
                f"input_layernorm=True, without which they do nothing; given were {norm}"
            )

    def _add_projections(
        self, hidden_size: int, bias: bool, norm: NormKind, place: dict[str, Any]
    ) -> None:
        projections = self._projections()
        self.layernorm: nn.Module | None = None
        if self.input_layernorm and not any(map(_is_normed, projections)):
            self.layernorm = norm.make(hidden_size, place["device"], place["dtype"])
        for name, members in projections.items():
            width = sum(self.widths[member] for member in members)
            made: nn.Module
            if _is_normed(name):
                wanted = self.return_layernorm_output
                options = {**asdict(norm), "return_layernorm_output": wanted, **place}
                made = LayerNormLinear(hidden_size, width, bias=bias, **options)
            else:
                made = Linear(hidden_size, width, bias, **place)
            self.add_module(name, made)

    def _projections(self) -> dict[str, tuple[str, ...]]:
        """The projections by name, and what each of them gives.

        One whose name begins with "layernorm_" norms its input; where three share the normed input,
        `layernorm` stands before them.
        """
        normed = "layernorm_" if self.input_layernorm else ""
        if self.attention_type == "self":
            if self.options.fuse_qkv_params:
                return {f"{normed}qkv": ("query", "key", "value")}
            return {name: (name,) for name in ("query", "key", "value")}
        if self.options.fuse_qkv_params:
            return {f"{normed}query": ("query",), "key_value": ("key", "value")}
        return {f"{normed}query": ("query",), "key": ("key",), "value": ("value",)}

    def norm_prefix(self) -> str | None:
        """What the names of the input norm's parameters begin with; None: there is no norm."""
        if self.layernorm is not None:
            return "layernorm."
        return next((f"{n}.layer_norm_" for n in self._projections() if _is_normed(n)), None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rename_attention(state_dict, prefix, self._projections(), self.widths)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Masks = None,
        *,
        encoder_output: torch.Tensor | None = None,
        rotary_pos_emb: Rotary = None,
        inference_params: InferenceParams | None = None,
        is_first_microbatch: bool | None = None,
        **core: Unpack[AttentionInputs],
    ) -> Any:
        """Attend.

        Args:
            hidden_states: [b, s, hidden_size], [s, b, hidden_size] or [t, hidden_size].
            attention_mask: as for `DotProductAttention`.
            encoder_output: in the form of hidden_states: where keys and values come from in cross
                attention.
            rotary_pos_emb: the angles that queries and keys are turned by, or a pair of them;
                `RotaryPositionEmbedding` gives them. They begin with the first token of a sequence,
                also when earlier tokens are kept.
            inference_params: what generation keeps; hidden_states are the tokens that are new.
            is_first_microbatch: as for `Linear`.
            **core: what `DotProductAttention` takes besides, such as cu_seqlens_q.

        Returns:
            The form of hidden_states; with `return_bias` or `return_layernorm_output` a tuple of
            that, then the last bias (None without one), then the normed input.

        Raises:
            ValueError: inputs that do not fit.
            QuaverError: no room is left for keys and values.
        """
        self._check(hidden_states, encoder_output, inference_params)
        parts = self._project(hidden_states, encoder_output, is_first_microbatch)
        query, key, value = (parts[name] for name in ("query", "key", "value"))
        begin = 0
        if inference_params is not None:
            begin = inference_params.length_of(self.core_attention)
        query, key = self._turn(query, key, rotary_pos_emb, begin, core)
        if inference_params is not None:
            mask_type = core.get("attn_mask_type") or self.core_attention.attn_mask_type
            core["attn_mask_type"] = _cached_mask(mask_type)
            key, value = self._keep(inference_params, key, value)
        out = self.core_attention(query, key, value, attention_mask, **core)
        projected = self.proj(out, is_first_microbatch)
        results = projected if self.return_bias else (projected,)
        if self.return_layernorm_output:
            results = (*results, parts["normed"])
        return results if len(results) > 1 else results[0]

    def backward_dw(self) -> None:
        """Compute the weights' gradients that `delay_wgrad_compute` has put off, the last first."""
        for module in reversed(list(self.children())):
            if isinstance(module, QuantizedWeights):
                module.backward_dw()

    def _check(
        self,
        x: torch.Tensor,
        encoder_output: torch.Tensor | None,
        inference_params: InferenceParams | None,
    ) -> None:
        dimensions = 2 if self.qkv_format == "thd" else 3
        if x.dim() != dimensions:
            raise ValueError(
                f"hidden_states must have {dimensions} dimensions in the format "
                f"{self.qkv_format}, not shape {tuple(x.shape)}"
            )
        cross = self.attention_type == "cross"
        if cross != (encoder_output is not None):
            raise ValueError(
                f"encoder_output goes with cross attention, and this is {self.attention_type}; it "
                f"was {'not ' if cross else ''}given"
            )
        if inference_params is not None and (cross or self.qkv_format == "thd"):
            raise ValueError(
                "inference_params go with self attention in the format bshd or sbhd, not with "
                f"{self.attention_type} attention in {self.qkv_format}"
            )

    def _project(
        self,
        x: torch.Tensor,
        encoder_output: torch.Tensor | None,
        is_first_microbatch: bool | None,
    ) -> dict[str, torch.Tensor]:
        """Query, key and value, [..., heads, channels], and the normed input if it is wanted."""
        found: dict[str, torch.Tensor] = {}
        if self.layernorm is not None:
            found["normed"] = x = self.layernorm(x)
        for name, members in self._projections().items():
            source = x if encoder_output is None or "query" in members else encoder_output
            projected = self.get_submodule(name)(source, is_first_microbatch)
            if self.return_layernorm_output and _is_normed(name):
                projected, found["normed"] = projected
            parts = projected.split([self.widths[member] for member in members], dim=-1)
            for member, part in zip(members, parts, strict=True):
                found[member] = part.unflatten(-1, (-1, self.channels))
        return found

    def _turn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rotary: Rotary,
        begin: int,
        core: AttentionInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize and turn queries and keys, in the order that the options say."""
        first = self.options.qk_norm is not None and self.options.qk_norm.before_rope
        if first:
            query, key = self._normalized(query, key)
        if rotary is not None:
            query, key = self._rotated(query, key, rotary, begin, core)
        return (query, key) if first else self._normalized(query, key)

    def _rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rotary: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        begin: int,
        core: AttentionInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form, interleaved = self.qkv_format, self.options.rotary_interleaved
        packed = form == "thd"
        first, second = rotary if isinstance(rotary, tuple) else (rotary, rotary)
        cu_seqlens = core.get("cu_seqlens_q") if packed else None
        tables = angle_tables(query, first[begin:], form, cu_seqlens=cu_seqlens)
        query = turn(query, tables, interleaved)
        if first is not second or self.attention_type == "cross":
            cu_seqlens = core.get("cu_seqlens_kv") if packed else None
            tables = angle_tables(key, second[begin:], form, cu_seqlens=cu_seqlens)
        return query, turn(key, tables, interleaved)

    def _normalized(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _keep(
        self, params: InferenceParams, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values; all so far in the module's format."""
        if self.qkv_format == "bshd":
            return params.append(self.core_attention, key, value)
        kept = params.append(self.core_attention, key.transpose(0, 1), value.transpose(0, 1))
        return kept[0].transpose(0, 1), kept[1].transpose(0, 1)


def _is_normed(name: str) -> bool:
    return name.startswith("layernorm_")


def _cached_mask(mask_type: str) -> str:
    """The mask type among all tokens so far: the last query stands beside the last key."""
    if "padding" in mask_type:
        raise ValueError(
            f"with inference_params the sequences have one length, so that {mask_type} does not "
            'apply; pass attn_mask_type="arbitrary" and a mask'
        )
    return "causal_bottom_right" if mask_type == "causal" else mask_type
