"""What the modules share that multiply with weights of their own: one, or one for each product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quaver.functional import LinearPlan, quantize_weight
from quaver.functional.wgrad import WeightGradient
from quaver.nn.base import QuantizedModule
from quaver.nn.init import InitOptions, current_init, module_seed, quantize_parameter
from quaver.nn.wgrad import Delayed, WgradOptions
from quaver.recipe import DEFAULT_RECIPE, Recipe, Role
from quaver.scaling import Call, backward_passes
from quaver.scaling.state import FORWARD_SLOTS
from quaver.tensors import Quantized, QuantizedTensor


class QuantizedWeights(QuantizedModule):
    """Mixin: product i of the module multiplies with the parameter `weight_names[i]`."""

    weight_names: Sequence[str] = ("weight",)

    wgrad: WgradOptions | None = None
    _delayed_wgrads: Delayed
    _init_options: InitOptions | None = None

    def weight_matrix(self, gemm: int = 0) -> torch.Tensor:
        """The weight of a product as [out_features, in_features]."""
        return self._weight(gemm)

    def _weight(self, gemm: int) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, self.weight_names[gemm])
        return weight

    # ---- one forward

    def make_plan(self, call: Call, gemm: int = 0) -> LinearPlan:
        """How product `gemm` of this module is quantized in a forward."""
        states = self.recipe_states
        return LinearPlan(
            states["forward"],
            states["backward"],
            bool(call.record),
            call.again,
            backward_passes(),
            call.outer,
            override=None if call.recipe is None else call.recipe.backward_override,
            gemm=gemm,
            drawn=call.drawn,
        )

    def weight_plan(
        self, call: Call, is_first_microbatch: bool | None = None, gemm: int = 0
    ) -> LinearPlan:
        """`make_plan`, with the kept weight and with where the weight's gradient goes."""
        plan = self.make_plan(call, gemm)
        if is_first_microbatch is not None:
            plan = plan._replace(weight=self._cached_weight(plan, is_first_microbatch))
        if self.wgrad is not None:
            self.wgrad.check(call.recipe)
            taker = self._taker(is_first_microbatch, gemm)
            plan = plan._replace(wgrad=taker, keeps_input=self.wgrad.save_original_input)
        return plan

    def _taker(self, is_first_microbatch: bool | None, gemm: int = 0) -> WeightGradient | None:
        """What takes the gradient of a weight; None: autograd."""
        if self.wgrad is None or not self.wgrad.redirects:
            return None
        return self.wgrad.taker(self._weight(gemm), is_first_microbatch, self._delayed_wgrads)

    def _cached_weight(self, plan: LinearPlan, is_first_microbatch: bool) -> Quantized:
        weight = self.weight_matrix(plan.gemm)
        cache = self._weight_cache or {}
        kept = cache.get(plan.gemm)
        turned = torch.is_grad_enabled() and plan.override is None  # a backward multiplies with it
        if (
            is_first_microbatch
            or kept is None
            or not _lies_on(kept, weight.device)
            or (turned and kept.columnwise is None)
        ):
            with torch.inference_mode(False), torch.no_grad():
                kept = quantize_weight(weight, plan, columnwise=turned)
            self._weight_cache = {**cache, plan.gemm: kept}  # replicas share the old one
        return kept

    def _observe_weights(self) -> None:
        """Record the weights' amaxes without a cast, for calibration."""
        state = self.recipe_states["forward"]
        for gemm in range(len(self.weight_names)):
            if not isinstance(self._weight(gemm), QuantizedTensor):
                state.observe(self.weight_matrix(gemm).detach(), weight_slot(gemm))

    def backward_dw(self) -> None:
        """Compute the weights' gradients that `delay_wgrad_compute` has put off.

        They go to `weight.grad`, or to `weight.main_grad` with `fuse_wgrad_accumulation`.
        """
        delayed = self.__dict__.get("_delayed_wgrads", [])
        while delayed:
            delayed[0]()
            delayed.pop(0)  # not before: what raises can be mended and tried again

    def _init_wgrad(self, wgrad: WgradOptions | None) -> None:
        if wgrad is not None:
            wgrad.check(self.recipe)
            self.wgrad = wgrad
            self._delayed_wgrads = []

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if "_delayed_wgrads" in state:  # they belong to this module's graph
            state["_delayed_wgrads"] = []
        return state

    def _drop_quantized(self) -> None:
        super()._drop_quantized()
        for name in ("_init_options", "wgrad", "_delayed_wgrads"):
            self.__dict__.pop(name, None)

    # ---- weights that are replaced

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}_extra_state" not in state_dict:
            for gemm, name in enumerate(self.weight_names):
                if f"{prefix}{name}" in state_dict:
                    self._forget_weight(gemm)

    def _forget_weight(self, gemm: int = 0) -> None:
        """A weight was replaced: its scale and the kept copy are another's."""
        self._weight_cache = None
        if "forward" in self.recipe_states:
            self.recipe_states["forward"].forget(weight_slot(gemm))

    # ---- quantized weights

    def _weight_role(self) -> Role:
        return Role("weight", self.qualified_name, type(self).__name__)

    def set_weight_scale(self) -> None:
        """Set the weights' scales from their own amaxes, so that the first cast knows them.

        Does nothing for a weight on the meta device, or one that is quantized already.
        """
        for gemm in range(len(self.weight_names)):
            weight = self._weight(gemm)
            if weight.device.type == "meta":
                continue
            self._refresh_states(self.recipe or DEFAULT_RECIPE, weight.device)
            if not isinstance(weight, QuantizedTensor):
                with torch.no_grad():
                    self.recipe_states["forward"].set_scale(weight_slot(gemm), weight.detach())

    def quantize_weight(self) -> None:
        """Replace each weight by a quantized parameter, made on the weight's own device."""
        recipe = self.recipe or DEFAULT_RECIPE
        for gemm, name in enumerate(self.weight_names):
            weight = self._weight(gemm)
            if not isinstance(weight, QuantizedTensor):
                quantized = quantize_parameter(weight, recipe, False, self._weight_role())
                setattr(self, name, quantized)
                self._weight_cache = None

    def dequantize_weight(self) -> None:
        """Replace each quantized weight by the high-precision values that it stands for."""
        for gemm, name in enumerate(self.weight_names):
            weight = self._weight(gemm)
            if isinstance(weight, QuantizedTensor):
                plain = nn.Parameter(weight.dequantize(), requires_grad=weight.requires_grad)
                setattr(self, name, plain)
                self._weight_cache = None

    # ---- initialization

    def _note_init(self) -> None:
        """Remember the `quantized_model_init` around the module's making."""
        self._init_options = current_init()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Context manager around the drawing of the parameters; quantized weights stay so."""
        self._unquantized_weights()
        with module_seed(self._weight(0).device):
            yield
        self._quantize_drawn_weights()

    def _unquantized_weights(self) -> None:
        """Before weights are drawn anew: let each be a high-precision parameter."""
        for gemm, name in enumerate(self.weight_names):
            self._forget_weight(gemm)
            weight = self._weight(gemm)
            if isinstance(weight, QuantizedTensor):
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                setattr(self, name, nn.Parameter(empty, requires_grad=weight.requires_grad))

    def _quantize_drawn_weights(self) -> None:
        """After weights were drawn: quantize them if the module was made to have it so."""
        options = self._init_options
        if options is None:
            return
        recipe: Recipe = options.recipe or self.recipe or DEFAULT_RECIPE
        for gemm, name in enumerate(self.weight_names):
            role = self._weight_role()
            drawn = quantize_parameter(self._weight(gemm), recipe, options.preserve, role)
            setattr(self, name, drawn)


def input_slot(gemm: int) -> int:
    """The forward slot of a product's input."""
    return len(FORWARD_SLOTS) * gemm


def weight_slot(gemm: int) -> int:
    """The forward slot of a product's weight."""
    return input_slot(gemm) + 1


def _lies_on(kept: Quantized, device: torch.device) -> bool:
    return kept.rowwise is not None and kept.rowwise.data.device == device
