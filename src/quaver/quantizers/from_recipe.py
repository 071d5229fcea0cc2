"""Which quantizer a recipe has for which tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quaver.errors import RecipeError
from quaver.quantizers.base import Quantizer
from quaver.quantizers.block import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from quaver.quantizers.float8 import Float8CurrentScalingQuantizer
from quaver.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)


def quantizer_of(recipe: Recipe, role: Role) -> Quantizer | None:
    """The quantizer that `recipe` has for the tensor of `role`; None: high precision.

    For DelayedScaling, whose scales a module's state keeps, it is the one for a tensor alone: with
    the scale of its own amax.

    Raises:
        RecipeError: a recipe without quantizers, or a factory that returns something else.
    """
    for recipe_class, make in _MAKERS.items():
        if isinstance(recipe, recipe_class):
            return make(recipe, role)
    raise RecipeError(f"a recipe with quantizers is needed, not {recipe!r}")


def _mode(role: Role) -> str:
    return "backward" if role.tensor.startswith("grad") else "forward"


def _delayed(recipe: DelayedScaling, role: Role) -> Quantizer:
    return Float8CurrentScalingQuantizer(recipe.fp8_format.dtype(_mode(role)))


def _current(recipe: Float8CurrentScaling, role: Role) -> Quantizer:
    quantizer = Float8CurrentScalingQuantizer(
        recipe.fp8_format.dtype(_mode(role)),
        power_2_scale=recipe.use_power_2_scales,
        amax_epsilon=recipe.amax_epsilon,
    )
    quantizer.reduces_over_region = recipe.reduce_amax
    return quantizer


def _block(recipe: Float8BlockScaling, role: Role) -> Quantizer:
    dims = {"input": recipe.x_block_scaling_dim, "weight": recipe.w_block_scaling_dim}
    return Float8BlockQuantizer(
        recipe.fp8_format.dtype(_mode(role)),
        block_scaling_dim=dims.get(role.tensor, recipe.grad_block_scaling_dim),
        power_2_scale=not recipe.use_f32_scales,
        amax_epsilon=recipe.amax_epsilon,
    )


def _mx(recipe: MXFP8BlockScaling, role: Role) -> Quantizer:
    return MXFP8Quantizer(recipe.fp8_format.dtype(_mode(role)))


def _nvfp4(recipe: NVFP4BlockScaling, role: Role) -> Quantizer:
    is_weight = role.tensor == "weight"
    return NVFP4Quantizer(
        two_dimensional=is_weight and not recipe.disable_2d_quantization,
        hadamard=not is_weight and not recipe.disable_rht,
        stochastic_rounding=_mode(role) == "backward" and not recipe.disable_stochastic_rounding,
        seed=recipe.seed,
    )


def _custom(recipe: CustomRecipe, role: Role) -> Quantizer | None:
    quantizer = recipe.qfactory(role)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise RecipeError(
            f"CustomRecipe.qfactory must return a quantizer or None, not {quantizer!r} for {role}"
        )
    return quantizer


_MAKERS: dict[type[Recipe], Callable[[Any, Role], Quantizer | None]] = {
    DelayedScaling: _delayed,
    Float8CurrentScaling: _current,
    Float8BlockScaling: _block,
    MXFP8BlockScaling: _mx,
    NVFP4BlockScaling: _nvfp4,
    CustomRecipe: _custom,
}
