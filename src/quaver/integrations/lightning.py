"""Lightning: a precision plugin for its Trainer and for Fabric."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from lightning.pytorch.plugins.precision.precision import Precision
from torch import nn

from quaver.conversion import DEFAULT_EXCLUDE, ConversionReport, convert
from quaver.conversion.rules import Matches
from quaver.errors import RecipeError
from quaver.nn import QuantizedModule
from quaver.recipe import Recipe, named_recipe
from quaver.scaling import autocast


class QuaverPrecision(Precision):  # type: ignore[misc]
    """Runs the linear layers of a LightningModule with a recipe, in each of its steps.

    `Trainer(plugins=QuaverPrecision("mxfp8"))` or `Fabric(plugins=...)`. The layers are converted
    in place, on whichever devices they are; a module that has Quaver's layers already is left as
    it is. Parameters, optimizers and checkpoints stay in high precision.

    Args:
        recipe: a recipe, or the name of one.
        compute_dtype: of everything else, by `torch.autocast` on the module's device; None: the
            parameters' own.
        exclude: layers that stay as they are, as for `quaver.convert`.

    Attributes:
        report: what was converted; empty before `convert_module`.

    Raises:
        RecipeError: no such recipe.
    """

    precision = "32-true"  # of the parameters; Lightning knows no name for the rest

    def __init__(
        self,
        recipe: Recipe | str = "delayed",
        *,
        compute_dtype: torch.dtype | None = None,
        exclude: Matches = DEFAULT_EXCLUDE,
    ) -> None:
        super().__init__()
        self.recipe = named_recipe(recipe) if isinstance(recipe, str) else recipe
        if not isinstance(self.recipe, Recipe):
            raise RecipeError(f"recipe must be a recipe or the name of one, not {recipe!r}")
        self.compute_dtype = compute_dtype
        self.exclude = exclude
        self.report = ConversionReport()
        self._module: weakref.ref[nn.Module] | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """`module`, with its linear layers converted in place."""
        self._module = weakref.ref(module)
        if not any(isinstance(each, QuantizedModule) for each in module.modules()):
            self.report = convert(module, self.recipe, exclude=self.exclude)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """The recipe in force, for a forward or a step."""
        stack = ExitStack()
        if self.compute_dtype is not None:
            stack.enter_context(torch.autocast(self._device_type(), self.compute_dtype))
        stack.enter_context(autocast(recipe=self.recipe))
        return stack

    def _device_type(self) -> str:
        module = None if self._module is None else self._module()
        parameter = None if module is None else next(module.parameters(), None)
        return "cpu" if parameter is None else parameter.device.type
