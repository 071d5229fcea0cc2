"""The recipes by short names, for files, command lines and other places without Python objects."""

from __future__ import annotations

from typing import Any

from quaver.errors import RecipeError
from quaver.recipe.base import Format, Recipe
from quaver.recipe.delayed import DelayedScaling
from quaver.recipe.stateless import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPE_NAMES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
"""The class of each recipe that has a name."""


def named_recipe(name: str, **options: Any) -> Recipe:
    """The recipe called `name`.

    Args:
        name: a key of `RECIPE_NAMES`.
        options: arguments of the recipe's class; `fp8_format` also by its name, such as "HYBRID".

    Raises:
        RecipeError: no such recipe, option or format.
    """
    cls = RECIPE_NAMES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise RecipeError(f"the recipe must be one of {', '.join(RECIPE_NAMES)}, not {name!r}")
    form = options.get("fp8_format")
    if isinstance(form, str):
        if form not in Format.__members__:
            known = ", ".join(Format.__members__)
            raise RecipeError(f"fp8_format must be one of {known}, not {form!r}")
        options = {**options, "fp8_format": Format[form]}
    try:
        return cls(**options)
    except TypeError as error:
        raise RecipeError(f"{cls.__name__} cannot take these options: {error}") from error
