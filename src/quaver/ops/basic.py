"""The basic fusible operations."""

from __future__ import annotations

import math

import torch
from torch import nn

from quaver.devices import on_device, operands_device
from quaver.errors import QuaverError
from quaver.functional import dequantized
from quaver.nn.init import InitMethod, current_init, quantize_parameter
from quaver.nn.linear import Linear as LinearModule
from quaver.nn.linear import QuantizedLinear
from quaver.nn.wgrad import WgradOptions
from quaver.ops.operation import FusibleOperation
from quaver.recipe import DEFAULT_RECIPE, Recipe
from quaver.tensors import QuantizedTensor


class BasicLinear(QuantizedLinear, FusibleOperation):
    """y = x W^T, in FP8 where a recipe is in force.

    Args:
        in_features, out_features: the weight is [out_features, in_features].
        device, dtype: of the weight.
        recipe: in force where no `autocast` names one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self._init_quantized(recipe)
        self._init_options = current_init()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty((out_features, in_features), device=device, dtype=dtype)
        )
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, as torch.nn.Linear does; a quantized one stays quantized."""
        weight = self.weight
        if isinstance(weight, QuantizedTensor):
            weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        options = self._init_options
        if options is not None:
            recipe = options.recipe or self.recipe or DEFAULT_RECIPE
            self.weight = quantize_parameter(weight, recipe, options.preserve, self._weight_role())

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The product without quantization; a quantized weight is dequantized for it."""
        return nn.functional.linear(x, dequantized(self.weight))

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Bias(FusibleOperation):
    """y = x + b.

    Args:
        size: of x's last dimension.
        device, dtype: of the bias.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + b in x's dtype, on x's device.

        Raises:
            DeviceMismatchError: x and the bias lie on two devices.
            QuaverError: x's last dimension has another size, or x is a scalar.
        """
        if x.shape[-1:] != self.bias.shape:
            raise QuaverError(
                f"Bias adds to {self.size} features in x's last dimension, not to shape "
                f"{tuple(x.shape)}"
            )
        operands_device(("x", "bias"), (x, self.bias))
        with on_device(x.device):
            return x + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"size={self.size}"


class Linear(LinearModule, FusibleOperation):  # type: ignore[misc]
    """y = x W^T + b as a fusible operation.

    Args:
        in_features, out_features, bias, device, dtype, recipe, wgrad, init_method: as for
            `quaver.Linear`. Its `return_bias` is not here, since operations pass on one tensor: put
            a Bias behind instead.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        wgrad: WgradOptions | None = None,
        init_method: InitMethod | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            device=device,
            dtype=dtype,
            recipe=recipe,
            wgrad=wgrad,
            init_method=init_method,
        )
