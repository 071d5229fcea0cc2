"""What the modules share that norm their input before they multiply it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from quaver.devices import operands_device
from quaver.errors import QuaverError, RecipeError
from quaver.functional import layer_norm, rms_norm
from quaver.functional.norm_linear import Norm, NormOptions
from quaver.nn.init import InitMethod
from quaver.nn.weights import QuantizedWeights
from quaver.nn.wgrad import WgradOptions

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class NormedInput(QuantizedWeights):
    """Mixin: the parameters `layer_norm_weight` [K] and, of a layer norm, `layer_norm_bias` [K].

    Attributes:
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean square.
        zero_centered_gamma: 1 + layer_norm_weight multiplies.
        return_layernorm_output: the forward returns the norm's output, too.
        return_bias: the forward leaves its last bias out and returns it.
    """

    linear_names: ClassVar[tuple[tuple[str, str], ...]] = (("weight", "bias"),)
    """The parameters of each linear layer, weight and bias."""

    layer_norm_weight: torch.Tensor
    layer_norm_bias: torch.Tensor | None
    normalization: str
    eps: float
    zero_centered_gamma: bool
    return_layernorm_output: bool
    return_bias: bool

    def _make_norm(
        self,
        size: int,
        normalization: str,
        eps: float,
        zero_centered_gamma: bool,
        factory: dict[str, Any],
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise QuaverError(
                f"normalization must be one of {', '.join(NORMALIZATIONS)}, not {normalization!r}"
            )
        self.normalization = normalization
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.empty(size, **factory))
        bias = None
        if normalization == "LayerNorm":
            bias = nn.Parameter(torch.empty(size, **factory))
        self.register_parameter("layer_norm_bias", bias)

    def _make_linear(
        self, gemm: int, shape: tuple[int, int], bias: bool, factory: dict[str, Any]
    ) -> None:
        weight_name, bias_name = self.linear_names[gemm]
        setattr(self, weight_name, nn.Parameter(torch.empty(shape, **factory)))
        parameter = nn.Parameter(torch.empty(shape[0], **factory)) if bias else None
        self.register_parameter(bias_name, parameter)

    def _reset_norm(self) -> None:
        gain = nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_
        gain(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _reset_linear(self, gemm: int, init_method: InitMethod | None) -> None:
        """As torch.nn.Linear does; with `init_method` by that, and the bias begins with zeros."""
        weight = self._weight(gemm)
        bias = getattr(self, self.linear_names[gemm][1])
        with torch.no_grad():
            if init_method is not None:
                init_method(weight)
                if bias is not None:
                    bias.zero_()
                return
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if bias is not None:
                bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
                nn.init.uniform_(bias, -bound, bound)

    def _init_wgrad(self, wgrad: WgradOptions | None) -> None:
        if wgrad is not None and wgrad.save_original_input:
            raise RecipeError(
                f"save_original_input cannot be used by {type(self).__name__}, whose products do "
                "not get its input; leave it False"
            )
        super()._init_wgrad(wgrad)

    # ---- one forward

    def _norm(self) -> Norm:
        options = NormOptions(self.eps, self.zero_centered_gamma, self.normalization == "RMSNorm")
        return Norm(self.layer_norm_weight, self.layer_norm_bias, options)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x in high precision."""
        if self.normalization == "RMSNorm":
            return rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return layer_norm(x, weight, bias, self.eps, self.zero_centered_gamma)

    def _returned(
        self, y: torch.Tensor, bias: torch.Tensor | None, normed: torch.Tensor | None
    ) -> Any:
        """What the forward returns: y alone, or a tuple with what else was asked for."""
        results: list[torch.Tensor | None] = [y]
        if self.return_bias:
            results.append(None if bias is None else bias.to(y.dtype))
        if self.return_layernorm_output:
            results.append(normed)
        return tuple(results) if len(results) > 1 else y

    def _check_operands(self, x: torch.Tensor) -> None:
        names = ["layer_norm_weight", "layer_norm_bias"]
        for pair in self.linear_names:
            names += pair
        operands_device(("x", *names), (x, *(getattr(self, name) for name in names)))
        if not x.is_floating_point() or x.element_size() == 1:
            raise TypeError(f"x must be of a high-precision floating-point dtype, not {x.dtype}")
        width = self.layer_norm_weight.shape[0]
        if x.dim() == 0 or x.shape[-1] != width:
            raise ValueError(
                f"x must have {width} features in its last dimension, not shape {tuple(x.shape)}"
            )

    def _shown(self) -> str:
        """The options of `repr` that the modules share."""
        text = f"bias={getattr(self, self.linear_names[-1][1]) is not None}"
        text += f", normalization={self.normalization}, eps={self.eps}"
        options = ("zero_centered_gamma", "return_bias", "return_layernorm_output")
        return text + "".join(f", {name}=True" for name in options if getattr(self, name))
