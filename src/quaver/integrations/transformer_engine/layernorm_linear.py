"""`transformer_engine.pytorch.LayerNormLinear` and `LayerNormMLP`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quaver import nn as native
from quaver.integrations.transformer_engine.base import TransformerEngineBaseModule
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


@transformer_engine_name("transformer_engine.pytorch.module.layernorm_linear")
class LayerNormLinear(TransformerEngineBaseModule, native.LayerNormLinear):
    """quaver.nn.LayerNormLinear with the options that scripts pass; as the shim's `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: DeviceLike = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        refuse_unknown("LayerNormLinear", locals())
        refuse_parallel("LayerNormLinear", tp_group, tp_size)
        native.LayerNormLinear.__init__(
            self,
            in_features,
            out_features,
            bias=bias,
            normalization=normalization,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
            return_bias=return_bias,
            device=chosen_device(device),
            dtype=params_dtype,
            init_method=WeightInit(init_method, get_rng_state_tracker),
            wgrad=wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute),
        )
        self.use_bias = bias
        self.qualified_name = name or ""

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """As quaver.nn.LayerNormLinear's."""
        options = {"fp8_output": fp8_output, "fp8_grad": fp8_grad}
        refuse_unknown("LayerNormLinear.forward", options)
        return super().forward(inp, is_first_microbatch)


_ACTIVATION_NAMES = {"gpt_oss_swiglu": "clamped_swiglu"}


@transformer_engine_name("transformer_engine.pytorch.module.layernorm_mlp")
class LayerNormMLP(TransformerEngineBaseModule, native.LayerNormMLP):
    """quaver.nn.LayerNormMLP with the options that scripts pass; as the shim's `Linear`.

    `seq_length` and `micro_batch_size`, which warm kernels up elsewhere, have nothing to warm here.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: RngTracker | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: DeviceLike = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        refuse_unknown("LayerNormMLP", locals())
        refuse_parallel("LayerNormMLP", tp_group, tp_size)
        native.LayerNormMLP.__init__(
            self,
            hidden_size,
            ffn_hidden_size,
            bias=bias,
            normalization=normalization,
            activation=_ACTIVATION_NAMES.get(activation, activation),
            activation_params=activation_params,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
            return_bias=return_bias,
            device=chosen_device(device),
            dtype=params_dtype,
            init_method=WeightInit(init_method, get_rng_state_tracker),
            output_layer_init_method=WeightInit(output_layer_init_method, get_rng_state_tracker),
            wgrad=wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute),
        )
        self.use_bias = bias
        self.qualified_name = name or ""

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As quaver.nn.LayerNormMLP's."""
        return super().forward(inp, is_first_microbatch)
