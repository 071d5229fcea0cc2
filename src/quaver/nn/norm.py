"""LayerNorm and RMSNorm: torch's, in float32 arithmetic, with a gain that may be stored minus 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quaver.errors import QuaverError
from quaver.functional import layer_norm, rms_norm


def _one_size(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape [K] of the parameters.

    Raises:
        QuaverError: it has not one dimension.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        raise QuaverError(
            f"normalized_shape must be one size, that of the last dimension, not {shape}; "
            "torch.nn's norms go over several"
        )
    return shape


class LayerNorm(nn.LayerNorm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    As `torch.nn.LayerNorm`, with the same parameters and names, in float32 arithmetic throughout.

    Args:
        normalized_shape: the size of the last dimension.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: whether there is a bias beside the weight.
        device, dtype: of the parameters.
        zero_centered_gamma: 1 + weight multiplies, and the weight begins with zeros.

    Raises:
        QuaverError: `normalized_shape` has several sizes.
    """

    zero_centered_gamma = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        shape = _one_size(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        _center(self, zero_centered_gamma)

    def reset_parameters(self) -> None:
        """Let the gain be 1 and the bias 0."""
        super().reset_parameters()
        _reset_centered(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of each vector of the last dimension.

        Args:
            input: [..., K], float32, bfloat16 or float16, on the device of the parameters.

        Returns:
            [..., K], in the input's dtype; float32 under `torch.autocast` on an accelerator, as
            torch's.
        """
        return layer_norm(input, self.weight, self.bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        """What `repr` shows of the options."""
        return super().extra_repr() + _shown(self)


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    As `torch.nn.RMSNorm`, with the same parameter and name, in float32 arithmetic throughout.

    Args:
        normalized_shape: the size of the last dimension.
        eps: added to the mean square; None: that of float32.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.
        zero_centered_gamma: 1 + weight multiplies, and the weight begins with zeros.

    Raises:
        QuaverError: `normalized_shape` has several sizes.
    """

    zero_centered_gamma = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        shape = _one_size(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        _center(self, zero_centered_gamma)

    def reset_parameters(self) -> None:
        """Let the gain be 1."""
        super().reset_parameters()
        _reset_centered(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of each vector of the last dimension.

        Args:
            x: [..., K], float32, bfloat16 or float16, on the device of the weight.

        Returns:
            [..., K], in x's dtype; float32 under `torch.autocast` on an accelerator, as torch's.
        """
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        """What `repr` shows of the options."""
        return super().extra_repr() + _shown(self)


def _center(module: Any, zero_centered_gamma: bool) -> None:
    """Note the option of a module just made, whose weight is torch's ones until then."""
    if zero_centered_gamma and module.weight is None:
        raise QuaverError(
            "zero_centered_gamma=True needs a weight; pass elementwise_affine=True, or leave it out"
        )
    module.zero_centered_gamma = zero_centered_gamma
    _reset_centered(module)


def _reset_centered(module: Any) -> None:
    if module.zero_centered_gamma:
        nn.init.zeros_(module.weight)


def _shown(module: Any) -> str:
    return ", zero_centered_gamma=True" if module.zero_centered_gamma else ""
