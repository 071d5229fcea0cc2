"""Options of the weights' gradients: where they go, when they are computed, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quaver.errors import RecipeError
from quaver.functional import WeightGradient
from quaver.recipe import DelayedScaling, Recipe

Delayed = list[Callable[[], None]]
"""Computations of weights' gradients that were put off, in the order of the backward passes."""


@dataclass(frozen=True, kw_only=True)
class WgradOptions:
    """How a linear computes the gradient of its weight.

    Attributes:
        fuse_wgrad_accumulation: add it to `weight.main_grad`, in that tensor's dtype, and leave
            `weight.grad` alone. A forward with is_first_microbatch=True overwrites instead.
        delay_wgrad_compute: put it off until the module's `backward_dw()`.
        save_original_input: save the input as it came, which another layer may save anyway, and
            quantize it a second time in the backward. Not with DelayedScaling, whose scales will
            have changed by then.
    """

    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False

    @property
    def redirects(self) -> bool:
        """Whether the gradient does not go straight to autograd."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def check(self, recipe: Recipe | None) -> None:
        """Raise unless the options go together with `recipe`.

        Raises:
            RecipeError: `save_original_input` under DelayedScaling.
        """
        if self.save_original_input and isinstance(recipe, DelayedScaling):
            raise RecipeError(
                "save_original_input needs a recipe whose scales come from the tensor, such as "
                "Float8CurrentScaling(), not DelayedScaling"
            )

    def taker(
        self, weight: torch.Tensor, is_first_microbatch: bool | None, delayed: Delayed
    ) -> WeightGradient | None:
        """What takes the gradient of one forward; None: autograd."""
        if not self.redirects or not weight.requires_grad:
            return None
        return WeightGradient(
            weight,
            self.fuse_wgrad_accumulation,
            is_first_microbatch is True,
            delayed if self.delay_wgrad_compute else None,
        )
