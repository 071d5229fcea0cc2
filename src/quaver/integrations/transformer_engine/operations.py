"""`transformer_engine.pytorch.ops`: quaver.ops, some with the options that scripts pass."""

from __future__ import annotations

from typing import Any

import torch

from quaver import ops as native
from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.options import (
    DeviceLike,
    RngTracker,
    WeightInit,
    chosen_device,
    refuse_parallel,
    transformer_engine_name,
)

_NAME = "transformer_engine.pytorch.ops"


def _refuse(owner: str, mode: str | None, group: Any, accumulate: bool) -> None:
    refuse_parallel(owner, group, 1)
    if accumulate:
        raise QuaverError(
            f"ops.{owner}(accumulate_into_main_grad=True) is not taken; "
            "transformer_engine.pytorch.Linear takes fuse_wgrad_accumulation=True"
        )


@transformer_engine_name(_NAME)
class BasicLinear(native.BasicLinear):
    """quaver.ops.BasicLinear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: RngTracker | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        _refuse(
            "BasicLinear", tensor_parallel_mode, tensor_parallel_group, accumulate_into_main_grad
        )
        self._tracker = rng_state_tracker_function
        super().__init__(in_features, out_features, device=chosen_device(device), dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weight anew, as quaver.ops.BasicLinear does, from the tracker's stream."""
        WeightInit(lambda _: super(BasicLinear, self).reset_parameters(), self._tracker)(
            self.weight
        )


@transformer_engine_name(_NAME)
class Linear(native.Linear):
    """quaver.ops.Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: RngTracker | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        _refuse("Linear", tensor_parallel_mode, tensor_parallel_group, accumulate_into_main_grad)
        self._tracker = rng_state_tracker_function
        super().__init__(in_features, out_features, bias, device=chosen_device(device), dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as quaver.ops.Linear does, from the tracker's stream."""
        WeightInit(lambda _: super(Linear, self).reset_parameters(), self._tracker)(self.weight)


@transformer_engine_name(_NAME)
class Bias(native.Bias):
    """quaver.ops.Bias."""

    def __init__(
        self,
        size: int,
        *,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        refuse_parallel("ops.Bias", tensor_parallel_group, 1)
        super().__init__(size, device=chosen_device(device), dtype=dtype)


@transformer_engine_name(_NAME)
class RMSNorm(native.RMSNorm):
    """quaver.ops.RMSNorm; `sm_margin` is a hint for kernels and means nothing here."""

    def __init__(
        self,
        normalized_shape: int,
        *,
        eps: float = 1e-5,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            device=chosen_device(device),
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
        )


@transformer_engine_name(_NAME)
class LayerNorm(native.LayerNorm):
    """quaver.ops.LayerNorm; `sm_margin` is a hint for kernels and means nothing here."""

    def __init__(
        self,
        normalized_shape: int,
        *,
        eps: float = 1e-5,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            device=chosen_device(device),
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
        )


@transformer_engine_name(_NAME)
class MakeExtraOutput(native.MakeExtraOutput):
    """quaver.ops.MakeExtraOutput; with or without `in_place` the gradients' sum is the same."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()


def contents() -> dict[str, Any]:
    """The names of the module."""
    own = (BasicLinear, Linear, Bias, RMSNorm, LayerNorm, MakeExtraOutput)
    names = {name: getattr(native, name) for name in native.__all__}
    return {**names, **{kind.__name__: kind for kind in own}}
