"""What a user chooses: a recipe is a frozen, hashable value that is passed down, never looked up.

Numerics follow TransformerEngine's recipes of the same name; docs/design.md says where they differ.
"""

from quaver.recipe.base import BackwardOverride, Format, Recipe, Role
from quaver.recipe.delayed import DEFAULT_RECIPE, DelayedScaling
from quaver.recipe.names import RECIPE_NAMES, named_recipe
from quaver.recipe.stateless import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = [
    "DEFAULT_RECIPE",
    "RECIPE_NAMES",
    "BackwardOverride",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "Role",
    "named_recipe",
]
