"""LayerNormLinear: a norm and a linear layer, the norm's output quantized as it is made."""

from __future__ import annotations

from typing import Any

import torch

from quaver.functional import dequantized, plain_linear
from quaver.functional.norm_linear import norm_linear
from quaver.nn.init import InitMethod
from quaver.nn.prenorm import NormedInput
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import Recipe


class LayerNormLinear(NormedInput):
    """y = norm(x) W^T + b, in FP8 where a recipe is in force.

    DelayedScaling quantizes the norm's output from float32; the other recipes, and high precision,
    round it to the activations' dtype first.

    Args:
        in_features, out_features: the weight is [out_features, in_features].
        bias: whether the linear layer has one.
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean square.
        zero_centered_gamma: 1 + layer_norm_weight multiplies; it begins with zeros.
        return_layernorm_output: return the norm's output, too.
        return_bias: leave the bias out of y, and return it, too.
        device, dtype: of the parameters.
        recipe: in force where no `autocast` names one; None: high precision outside of `autocast`.
        init_method: fills the weight in place, and the bias begins with zeros; None: as
            torch.nn.Linear.
        wgrad: where the weight's gradient goes and when; None: to autograd, at once.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `weight`, `bias`. Under
    `quantized_model_init` the weight is a quantized tensor.

    Raises:
        QuaverError: another normalization.
        RecipeError: not a recipe, or `wgrad.save_original_input`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(  # noqa: PLR0913 - TE's options, by their keywords
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        init_method: InitMethod | None = None,
        wgrad: WgradOptions | None = None,
    ) -> None:
        super().__init__()
        self._init_quantized(recipe)
        self._init_wgrad(wgrad)
        self._note_init()
        self.in_features = in_features
        self.out_features = out_features
        self.return_layernorm_output = return_layernorm_output
        self.return_bias = return_bias
        self.init_method = init_method
        factory = {"device": device, "dtype": dtype}
        self._make_norm(in_features, normalization, eps, zero_centered_gamma, factory)
        self._make_linear(0, (out_features, in_features), bias, factory)
        self.reset_parameters()
        if recipe is not None and self.weight.device.type != "meta":
            self._refresh_states(recipe, self.weight.device)

    def reset_parameters(self) -> None:
        """Draw the parameters anew; a quantized weight stays quantized."""
        with self._drawing():
            self._reset_norm()
            self._reset_linear(0, self.init_method)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y = norm(x) W^T + b.

        Args:
            x: [..., in_features], on the device of the parameters.
            is_first_microbatch: None quantizes the weight anew, True does and keeps it, False
                takes what was kept.

        Returns:
            y [..., out_features] in x's dtype or that of `torch.autocast`; with `return_bias` or
            `return_layernorm_output` a tuple of y, then the bias (None without one), then the
            norm's output [..., in_features].

        Raises:
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            bias = None if self.return_bias else self.bias
            if call.quantized:
                plan = self.weight_plan(call, is_first_microbatch)
                weight, wanted = self.weight_matrix(), self.return_layernorm_output
                y, normed = norm_linear(x, self._norm(), weight, bias, plan, wanted)
                return self._returned(y, self.bias, normed)
            normed = self._normed(x)
            if call.recipe is not None:
                self.recipe_states["forward"].observe(normed.detach(), 0)
                self._observe_weights()
            taker = self._taker(is_first_microbatch)
            y = plain_linear(normed, dequantized(self.weight), bias, taker)
            return self._returned(y, self.bias, normed)
        finally:
            self.end_forward()

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self._shown()}"
