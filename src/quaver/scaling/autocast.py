"""autocast: the region that a user enters."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from quaver.errors import RecipeError
from quaver.recipe import DEFAULT_RECIPE, Recipe
from quaver.scaling.finalize import processes
from quaver.scaling.regions import Region, enter, entered_by, leave
from quaver.scaling.registry import Key


class autocast(ContextDecorator):  # noqa: N801 - the name that users of PyTorch and TransformerEngine know
    """Context manager: Quaver's modules inside compute in FP8. Regions nest; the innermost counts.

    Args:
        enabled: whether modules inside quantize.
        calibrating: with enabled=False: compute in high precision and record amaxes, also under
            no_grad, so that scales are known afterwards.
        recipe: what to quantize with; None: the recipe that `convert` attached to a module, else
            DelayedScaling().
        amax_reduction_group: the process group whose ranks share amaxes; None: the default group.

    Raises:
        RecipeError: `recipe` is not a recipe, or a switch is not a bool.

    At the exit of the outermost enabled region, if grad mode is on there, the forward scales are
    updated from the amaxes seen inside; the backward scales at the end of a backward pass. Under
    no_grad nothing is updated. Where amaxes are reduced over ranks, all ranks must enter alike,
    for calibration too, or the recipe must say reduce_amax=False. The state is per thread.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                raise RecipeError(
                    f"{name} must be True or False, not {value!r}; a recipe goes to recipe="
                )
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(
                "recipe must be None or a recipe such as DelayedScaling() or "
                f"named_recipe('mxfp8'), not {recipe!r}"
            )
        self._options = (recipe, enabled, calibrating, amax_reduction_group)

    def __enter__(self) -> None:
        recipe, enabled, calibrating, group = self._options
        region = Region(recipe, enabled, calibrating, group, owner=self)
        enter(region)
        expected = recipe or DEFAULT_RECIPE
        if enabled and expected.delayed() and processes():
            # Takes part in the reduction even if this rank uses no module inside; the region of a
            # single call names no recipe, and there the states that it uses say their keys.
            region.collector().keys[Key(expected, group, "forward")] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave(entered_by(self))
