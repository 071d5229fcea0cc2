"""Linear: torch's, in FP8 where a recipe is in force."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.devices import operands_device
from quaver.functional import LinearPlan, dequantized, linear, quantize_weight
from quaver.nn.base import QuantizedModule
from quaver.nn.init import InitOptions, current_init, quantize_parameter
from quaver.recipe import DEFAULT_RECIPE, Recipe, Role
from quaver.scaling import Call, backward_passes
from quaver.tensors import Quantized, QuantizedTensor


class QuantizedLinear(QuantizedModule):
    """What the linear modules share, whatever the layout of their weight.

    A subclass has `weight` and `bias`, says with `weight_matrix` what multiplies, and with
    `forward_high_precision` what the module does without a recipe.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def weight_matrix(self) -> torch.Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The module's output without quantization."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """y = x W^T + b, in FP8 where a recipe is in force.

        Args:
            x: [..., in_features], on the device of the parameters.
            is_first_microbatch: None quantizes the weight anew, True does and keeps it, False
                takes what was kept.

        Returns:
            [..., out_features], in x's dtype or that of `torch.autocast`.

        Raises:
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            if call.quantized:
                return self.forward_quantized(x, self.bias, call, is_first_microbatch)
            if call.recipe is not None:
                self._calibrate(x)
            return self.forward_high_precision(x)
        finally:
            self.end_forward()

    def _calibrate(self, x: torch.Tensor) -> None:
        state = self.recipe_states["forward"]
        state.observe(x.detach(), 0)
        if not isinstance(self.weight, QuantizedTensor):
            state.observe(self.weight_matrix().detach(), 1)

    def forward_quantized(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """The quantized output, between `prepare_forward` and `end_forward`."""
        weight = self.weight_matrix()
        plan = LinearPlan(
            self.recipe_states["forward"],
            self.recipe_states["backward"],
            bool(call.record),
            call.again,
            backward_passes(),
            call.outer,
            override=None if call.recipe is None else call.recipe.backward_override,
        )
        if is_first_microbatch is not None:
            plan = plan._replace(weight=self._cached_weight(weight, plan, is_first_microbatch))
        return linear(x, weight, bias, plan)

    def _cached_weight(
        self, weight: torch.Tensor, plan: LinearPlan, is_first_microbatch: bool
    ) -> Quantized:
        cache = self._weight_cache
        kept = None if cache is None else cache.rowwise
        if is_first_microbatch or kept is None or kept.data.device != weight.device:
            with torch.inference_mode(False), torch.no_grad():
                cache = self._weight_cache = quantize_weight(weight, plan, columnwise=True)
        if cache is None:
            raise ValueError("there is no kept weight")
        return cache

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        brought = f"{prefix}weight" in state_dict
        if brought and f"{prefix}_extra_state" not in state_dict:
            self._forget_weight()

    def _forget_weight(self) -> None:
        """The weight was replaced: its scale and the kept copy are another's."""
        self._weight_cache = None
        if "forward" in self.recipe_states:
            self.recipe_states["forward"].forget(1)

    # ---- quantized weights

    def _weight_role(self) -> Role:
        return Role("weight", self.qualified_name, type(self).__name__)

    def set_weight_scale(self) -> None:
        """Set the weight's scale from its own amax, so that the first cast knows one.

        Does nothing for a weight on the meta device, or one that is quantized already.
        """
        weight = self.weight
        if weight.device.type == "meta":
            return
        self._refresh_states(self.recipe or DEFAULT_RECIPE, weight.device)
        if not isinstance(weight, QuantizedTensor):
            with torch.no_grad():
                self.recipe_states["forward"].set_scale(1, weight.detach())

    def quantize_weight(self) -> None:
        """Replace the weight by a quantized parameter, made on the weight's own device."""
        if not isinstance(self.weight, QuantizedTensor):
            recipe = self.recipe or DEFAULT_RECIPE
            self.weight = quantize_parameter(self.weight, recipe, False, self._weight_role())
            self._weight_cache = None

    def dequantize_weight(self) -> None:
        """Replace a quantized weight by the high-precision values that it stands for."""
        weight = self.weight
        if isinstance(weight, QuantizedTensor):
            self.weight = nn.Parameter(weight.dequantize(), requires_grad=weight.requires_grad)
            self._weight_cache = None


class Linear(QuantizedLinear, nn.Linear):  # type: ignore[misc]
    """torch.nn.Linear that computes in FP8 where a recipe is in force.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear.
        recipe: in force where no `autocast` names one; None: high precision outside of `autocast`.

    Under `quantized_model_init` the weight is a quantized tensor.
    """

    _init_options: InitOptions | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._init_quantized(recipe)
        self._init_options = current_init()
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        if recipe is not None and self.weight.device.type != "meta":
            self._refresh_states(recipe, self.weight.device)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as torch.nn.Linear does; a quantized weight stays quantized."""
        options = self._init_options
        self._forget_weight()
        if isinstance(self.weight, QuantizedTensor):
            self.weight = nn.Parameter(
                torch.empty(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device),
                requires_grad=self.weight.requires_grad,
            )
        super().reset_parameters()
        if options is not None:
            recipe = options.recipe or self.recipe or DEFAULT_RECIPE
            self.weight = quantize_parameter(
                self.weight, recipe, options.preserve, self._weight_role()
            )

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `QuantizedLinear.forward`; `input=` is x, as for torch.nn.Linear."""
        given = input if x is None else x
        if given is None:
            raise TypeError("Linear.forward needs its input x")
        return super().forward(given, is_first_microbatch)

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """torch.nn.Linear's output; a quantized weight is dequantized for it."""
        return nn.functional.linear(x, dequantized(self.weight), self.bias)

    def _drop_quantized(self) -> None:
        super()._drop_quantized()
        self.__dict__.pop("_init_options", None)
