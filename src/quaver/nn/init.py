"""quantized_model_init: modules made inside have quantized weights from the start."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from quaver.errors import RecipeError
from quaver.kernels import cast
from quaver.recipe import DelayedScaling, Recipe
from quaver.tensors import Float8Tensor


class InitOptions(NamedTuple):
    """What `quantized_model_init` was given."""

    recipe: Recipe | None
    preserve: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[InitOptions | None] = []


_thread = _Thread()


class quantized_model_init(ContextDecorator):  # noqa: N801 - the name that users know
    """Context manager: Quaver's modules made inside get quantized weights.

    Each weight is drawn in high precision on its own device, quantized there with its own amax, and
    the high-precision value is dropped.

    Args:
        enabled: False: weights made inside stay in high precision.
        recipe: names the format; None: the module's own, else DelayedScaling().
        preserve_high_precision_init_val: keep the high-precision value on the CPU, for an
            optimizer's master weights: `weight.get_high_precision_init_val()`, then
            `weight.clear_high_precision_init_val()`.

    Raises:
        RecipeError: `recipe` is not a recipe.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(f"recipe must be a recipe such as DelayedScaling(), not {recipe!r}")
        self._options = InitOptions(recipe, preserve_high_precision_init_val) if enabled else None

    def __enter__(self) -> None:
        _thread.stack.append(self._options)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.stack.pop()


def current_init() -> InitOptions | None:
    """The options of the innermost `quantized_model_init` of this thread; None: not quantized."""
    return _thread.stack[-1] if _thread.stack else None


def quantize_parameter(weight: torch.Tensor, recipe: Recipe, preserve: bool) -> nn.Parameter:
    """`weight` as a Float8Tensor parameter on its own device, with the scale of its own amax.

    Args:
        preserve: keep the high-precision value on the CPU, reachable from the parameter.

    Raises:
        RecipeError: a recipe that has no per-tensor format.
    """
    if not isinstance(recipe, DelayedScaling):
        raise RecipeError(f"weights can be quantized for DelayedScaling, not for {recipe!r}")
    dtype = recipe.fp8_format.dtype("forward")
    value = weight.detach()
    with torch.no_grad():
        unset = torch.zeros(1, dtype=torch.float32, device=value.device)
        data, _, scale_inv = cast(value, unset, None, unset, 0, dtype, False)
    quantized = Float8Tensor(data, scale_inv, dtype=value.dtype)
    parameter = nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if preserve and value.device.type != "meta":
        parameter._high_precision_init_val = value.cpu().clone()  # type: ignore[attr-defined]
    return parameter
