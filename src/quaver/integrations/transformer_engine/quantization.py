"""`transformer_engine.pytorch.fp8` and `quantization`: autocast, availability, formats."""

from __future__ import annotations

from typing import Any

import torch

from quaver import scaling
from quaver.devices import is_fp8_available as native_is_fp8_available
from quaver.formats import MAX
from quaver.integrations.transformer_engine.extension import DType, dtype_of
from quaver.integrations.transformer_engine.options import (
    refuse_unknown,
    transformer_engine_name,
)
from quaver.integrations.transformer_engine.recipes import default_recipe
from quaver.nn import quantized_model_init
from quaver.recipe import Recipe

_NAME = "transformer_engine.pytorch.quantization"


@transformer_engine_name(_NAME)
class autocast(scaling.autocast):  # noqa: N801 - the name that users know
    """quaver.autocast; without a recipe, modules quantize with the shim's `DelayedScaling()`."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        refuse_unknown("autocast", {"_graph": _graph})
        chosen = default_recipe() if recipe is None else recipe
        super().__init__(bool(enabled), bool(calibrating), chosen, amax_reduction_group)


@transformer_engine_name(_NAME)
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast`, by its older name and those of its arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@transformer_engine_name(_NAME)
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """`quantized_model_init`, by its older name."""
    return quantized_model_init(bool(enabled), recipe, preserve_high_precision_init_val)


def check_support() -> tuple[bool, str]:
    """Every recipe runs everywhere: what hardware lacks is emulated, so there is no reason why not.

    `quaver doctor` says which path runs.
    """
    return bool(native_is_fp8_available()), ""


@transformer_engine_name(_NAME)
def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether a recipe runs here (it always does); if asked, also why not (an empty string)."""
    return check_support() if return_reason else check_support()[0]


def check_recipe_support(recipe: Recipe) -> None:
    """Do nothing: every recipe runs."""


def get_default_fp8_recipe() -> Recipe:
    """What an autocast without a recipe quantizes with."""
    return default_recipe()


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """The torch dtype of a recipe's forward tensors, or of its gradients."""
    dtype: torch.dtype = fp8_recipe.fp8_format.dtype("forward" if fprop_tensor else "backward")
    return dtype


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The number of that dtype."""
    return dtype_of(get_fp8_torch_dtype(fp8_recipe, fprop_tensor))


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """The largest value of that dtype."""
    return MAX[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple that grouped code pads to; Quaver's own layers take any number of rows."""
    return 32 if type(recipe).__name__ in ("MXFP8BlockScaling", "NVFP4BlockScaling") else 16
