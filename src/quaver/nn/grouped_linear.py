"""GroupedLinear: several linears, each for its own rows of one input, as experts have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class GroupedLinear(QuantizedWeights):
    """y_i = x_i W_i^T + b_i for groups of rows x_i, in FP8 where a recipe is in force.

    The parameters are weight0, weight1, ... [out_features, in_features] and bias0, bias1, ...
    [out_features]. Each group has scaling slots of its own. A group may be empty.

    Args:
        num_gemms: how many groups there are.
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        recipe: in force where no `autocast` names one; None: high precision outside of `autocast`.
        wgrad: where the weights' gradients go and when; None: to autograd, at once.
        init_method: fills each weight in place, and biases begin with zeros; None: as
            torch.nn.Linear.
        return_bias: leave the biases out of the outputs, and return them, too.

    Under `quantized_model_init` the weights are quantized tensors.
    """

    def __init__(  # noqa: PLR0913 - torch's and TE's options, all but four by keyword
        self,
        num_gemms: int,
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
        super().__init__()
        self.init_method = init_method
        self.return_bias = return_bias
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, not {num_gemms}")
        self.num_gemms = num_gemms
        self.weight_names = tuple(f"weight{i}" for i in range(num_gemms))
        self._init_quantized(recipe)
        self._init_wgrad(wgrad)
        self._note_init()
        self.in_features = in_features
        self.out_features = out_features
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for i, name in enumerate(self.weight_names):
            values = torch.empty((out_features, in_features), **factory)
            self.register_parameter(name, nn.Parameter(values))
            biases = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
            self.register_parameter(f"bias{i}", biases)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as torch.nn.Linear does; quantized weights stay quantized."""
        with self._drawing():
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            for i in range(self.num_gemms):
                weight, bias = self._weight(i), self._bias(i)
                with torch.no_grad():
                    if self.init_method is not None:
                        self.init_method(weight)
                        bound = 0.0
                    else:
                        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
                    if bias is not None:
                        nn.init.uniform_(bias, -bound, bound)

    def _bias(self, gemm: int) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self, f"bias{gemm}")
        return bias

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Any:
        """Each group's rows through its own linear.

        Args:
            x: [..., in_features], on the device of the parameters; the groups' rows one after the
                other. A quantized tensor is not quantized again; one with a scale a tensor, or
                with groups of whole blocks.
            m_splits: how many rows each group has; they add up to the rows of x.
            is_first_microbatch: None quantizes the weights anew, True does and keeps them, False
                takes what was kept.

        Returns:
            [..., out_features], in x's dtype or that of `torch.autocast`; with `return_bias` a
            pair of that without the biases, and the list of them (each None without biases).

        Raises:
            ValueError: m_splits does not fit.
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        groups = self._split(x, m_splits)
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            if not call.quantized:
                groups = [dequantized(rows) for rows in groups]
            if call.recipe is not None and not call.quantized:
                self._calibrate(groups)
            outputs = [
                self._product(rows, i, call, is_first_microbatch) for i, rows in enumerate(groups)
            ]
            y = torch.cat(outputs).reshape(*x.shape[:-1], self.out_features)
            if not self.return_bias:
                return y
            biases = [self._bias(i) for i in range(self.num_gemms)]
            return y, [None if bias is None else bias.to(y.dtype) for bias in biases]
        finally:
            self.end_forward()

    def _split(self, x: torch.Tensor, m_splits: Sequence[int]) -> Sequence[torch.Tensor]:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must have {self.in_features} features in its last dimension, "
                f"not shape {tuple(x.shape)}"
            )
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        sizes = [int(size) for size in m_splits]
        if len(sizes) != self.num_gemms or min(sizes) < 0 or sum(sizes) != rows.shape[0]:
            raise ValueError(
                f"m_splits must be {self.num_gemms} sizes that add up to the {rows.shape[0]} rows "
                f"of x, not {sizes}"
            )
        groups: Sequence[torch.Tensor] = rows.split(sizes)
        return groups

    def _product(
        self, rows: torch.Tensor, gemm: int, call: Call, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        weight = self.weight_matrix(gemm)
        bias = None if self.return_bias else self._bias(gemm)
        if call.quantized:
            return linear(rows, weight, bias, self.weight_plan(call, is_first_microbatch, gemm))
        plain, taker = dequantized(weight), self._taker(is_first_microbatch, gemm)
        if taker is not None:
            return plain_linear(rows, plain, bias, taker)
        return nn.functional.linear(rows, plain, bias)

    def _calibrate(self, groups: Sequence[torch.Tensor]) -> None:
        for i, rows in enumerate(groups):
            slot = self.slots_per_gemm["forward"] * i
            self.recipe_states["forward"].observe(rows.detach(), slot)
        self._observe_weights()

    def _check_operands(self, x: torch.Tensor) -> None:
        named = {"x": x, **dict(self.named_parameters(recurse=False))}
        operands_device(named.keys(), named.values())
        if not x.is_floating_point() or x.element_size() == 1:
            raise TypeError(f"x must be of a high-precision floating-point dtype, not {x.dtype}")

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self._bias(0) is not None}"
        )
