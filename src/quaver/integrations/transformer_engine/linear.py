"""`transformer_engine.pytorch.Linear` and `GroupedLinear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

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


@transformer_engine_name("transformer_engine.pytorch.module.linear")
class Linear(TransformerEngineBaseModule, native.Linear):  # type: ignore[misc]
    """quaver.Linear with the options that scripts pass.

    Weights are drawn from a normal distribution unless `init_method` says otherwise, and biases
    begin with zeros. Tensor parallel groups of one process are accepted; options of userbuffers
    and the like at their defaults.
    """

    use_bias = True
    parallel_mode: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: DeviceLike = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        refuse_unknown("Linear", locals())
        refuse_parallel("Linear", tp_group, tp_size)
        self._weight_init = WeightInit(init_method, get_rng_state_tracker, rng_tracker_name)
        native.Linear.__init__(
            self,
            in_features,
            out_features,
            bias,
            device=chosen_device(device),
            dtype=params_dtype,
            wgrad=wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input),
        )
        self.use_bias = bias
        self.return_bias = return_bias
        self.parallel_mode = parallel_mode
        self.qualified_name = name or ""

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew; with `defer_init` leave them as they are."""
        if defer_init:
            return
        with self._drawing():
            self._weight_init(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """y = inp W^T + b; with `return_bias` inp W^T, and b (empty if there is none)."""
        refuse_unknown("Linear.forward", {"fp8_output": fp8_output, "fp8_grad": fp8_grad})
        result = native.QuantizedLinear.forward(self, inp, is_first_microbatch)
        if not self.return_bias:
            return result
        y, bias = result
        return y, y.new_empty(0) if bias is None else bias


@transformer_engine_name("transformer_engine.pytorch.module.grouped_linear")
class GroupedLinear(TransformerEngineBaseModule, native.GroupedLinear):
    """quaver.GroupedLinear with the options that scripts pass; as `Linear`."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: DeviceLike = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        refuse_unknown("GroupedLinear", locals())
        refuse_parallel("GroupedLinear", tp_group, tp_size)
        self._weight_init = WeightInit(init_method, get_rng_state_tracker, rng_tracker_name)
        native.GroupedLinear.__init__(
            self,
            num_gemms,
            in_features,
            out_features,
            bias,
            device=chosen_device(device),
            dtype=params_dtype,
            wgrad=wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input),
        )
        self.use_bias = bias
        self.return_bias = return_bias
        self.qualified_name = name or ""

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew; with `defer_init` leave them as they are."""
        if defer_init:
            return
        with self._drawing():
            for i in range(self.num_gemms):
                self._weight_init(self._weight(i))
                bias = self._bias(i)
                if bias is not None:
                    nn.init.zeros_(bias)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int],
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Each group's rows; with `return_bias` without the biases, and a list of them."""
        result = native.GroupedLinear.forward(self, inp, m_splits, is_first_microbatch)
        if not self.return_bias:
            return result
        y, biases = result
        return y, [y.new_empty(0) if bias is None else bias for bias in biases]
