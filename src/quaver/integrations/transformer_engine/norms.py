"""`transformer_engine.pytorch.LayerNorm` and `RMSNorm`."""

from __future__ import annotations

from typing import Any

import torch

from quaver import nn as native
from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.options import (
    DeviceLike,
    chosen_device,
    transformer_engine_name,
)


def _size(owner: str, normalized_shape: Any, hidden_size: Any) -> Any:
    """The size, of which there is an older name."""
    if (normalized_shape is None) == (hidden_size is None):
        raise QuaverError(
            f"{owner} takes its size as normalized_shape, or by the older name hidden_size; "
            f"given were {normalized_shape!r} and {hidden_size!r}"
        )
    return hidden_size if normalized_shape is None else normalized_shape


class _Norm:
    sequence_parallel: bool | None

    def reset_rms_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()  # type: ignore[attr-defined]

    reset_layer_norm_parameters = reset_rms_norm_parameters


@transformer_engine_name("transformer_engine.pytorch.module.layernorm")
class LayerNorm(_Norm, native.LayerNorm):
    """quaver.LayerNorm with the options that scripts pass; `sequence_parallel` is kept for them."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Any = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _size("LayerNorm", normalized_shape, hidden_size),
            eps,
            device=chosen_device(device),
            dtype=dtype if params_dtype is None else params_dtype,
            zero_centered_gamma=zero_centered_gamma,
        )
        self.sequence_parallel = sequence_parallel


@transformer_engine_name("transformer_engine.pytorch.module.rmsnorm")
class RMSNorm(_Norm, native.RMSNorm):
    """quaver.RMSNorm with the options that scripts pass; `sequence_parallel` is kept for them."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Any = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _size("RMSNorm", normalized_shape, hidden_size),
            eps,
            device=chosen_device(device),
            dtype=dtype if params_dtype is None else params_dtype,
            zero_centered_gamma=zero_centered_gamma,
        )
        self.sequence_parallel = sequence_parallel
