"""Linear: torch's, in FP8 where a recipe is in force."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.devices import operands_device
from quaver.functional import dequantized, linear, plain_linear
from quaver.nn.init import InitMethod
from quaver.nn.weights import QuantizedWeights
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import Recipe
from quaver.scaling import Call

_TorchLinear = nn.Linear
"""Others put a class of theirs in its place for a while, as Lightning does."""


class QuantizedLinear(QuantizedWeights):
    """What the linear modules share, whatever the layout of their weight.

    A subclass has `weight` and `bias`, says with `weight_matrix` what multiplies, and with
    `forward_high_precision` what the module does without a recipe.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    return_bias: bool = False

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The module's output without quantization."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y = x W^T + b, in FP8 where a recipe is in force.

        Args:
            x: [..., in_features], on the device of the parameters. A quantized tensor is not
                quantized again: what it holds is multiplied with.
            is_first_microbatch: None quantizes the weight anew, True does and keeps it, False
                takes what was kept.

        Returns:
            [..., out_features], in x's dtype or that of `torch.autocast`; with `return_bias` a
            pair of that without the bias, and the bias (None without one).

        Raises:
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            if not self.return_bias:
                return self._output(x, self.bias, call, is_first_microbatch)
            y = self._output(x, None, call, is_first_microbatch)
            return y, None if self.bias is None else self.bias.to(y.dtype)
        finally:
            self.end_forward()

    def _output(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        if call.quantized:
            return self.forward_quantized(x, bias, call, is_first_microbatch)
        x = dequantized(x)
        if call.recipe is not None:
            self._calibrate(x)
        taker = self._taker(is_first_microbatch)
        if taker is not None or self.return_bias:
            return plain_linear(x, dequantized(self.weight_matrix()), bias, taker)
        return self.forward_high_precision(x)

    def _calibrate(self, x: torch.Tensor) -> None:
        self.recipe_states["forward"].observe(x.detach(), 0)
        self._observe_weights()

    def forward_quantized(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """The quantized output, between `prepare_forward` and `end_forward`."""
        plan = self.weight_plan(call, is_first_microbatch)
        return linear(x, self.weight_matrix(), bias, plan)

    def _check_operands(self, x: torch.Tensor) -> None:
        operands_device(("x", "weight", "bias"), (x, self.weight, self.bias))
        if not x.is_floating_point() or x.element_size() == 1:
            raise TypeError(f"x must be of a high-precision floating-point dtype, not {x.dtype}")
        if x.dim() == 0 or x.shape[-1] != self.in_width():
            raise ValueError(
                f"x must have {self.in_width()} features in its last dimension, "
                f"not shape {tuple(x.shape)}"
            )

    def in_width(self) -> int:
        """The size of x's last dimension."""
        return int(self.weight_matrix().shape[1])


class Linear(QuantizedLinear, nn.Linear):  # type: ignore[misc]
    """torch.nn.Linear that computes in FP8 where a recipe is in force.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        recipe: in force where no `autocast` names one; None: high precision outside of `autocast`.
        wgrad: where the weight's gradient goes and when; None: to autograd, at once.
        init_method: fills the weight in place, and the bias begins with zeros; None: as
            torch.nn.Linear.
        return_bias: leave the bias out of y, and return it, too.

    Under `quantized_model_init` the weight is a quantized tensor.
    """

    init_method: InitMethod | None = None

    def __init__(  # noqa: PLR0913 - torch's and TE's options, all but three by keyword
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
        return_bias: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.init_method = init_method
        self.return_bias = return_bias
        self._init_quantized(recipe)
        self._init_wgrad(wgrad)
        self._note_init()
        _TorchLinear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        if recipe is not None and self.weight.device.type != "meta":
            self._refresh_states(recipe, self.weight.device)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as torch.nn.Linear does; a quantized weight stays quantized."""
        with self._drawing():
            if self.init_method is None:
                super().reset_parameters()
            else:
                with torch.no_grad():
                    self.init_method(self.weight)
                    if self.bias is not None:
                        self.bias.zero_()

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        input: torch.Tensor | None = None,
    ) -> Any:
        """As `QuantizedLinear.forward`; `input=` is x, as for torch.nn.Linear."""
        given = input if x is None else x
        if given is None:
            raise TypeError("Linear.forward needs its input x")
        return super().forward(given, is_first_microbatch)

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """torch.nn.Linear's output; a quantized weight is dequantized for it."""
        return nn.functional.linear(x, dequantized(self.weight), self.bias)
