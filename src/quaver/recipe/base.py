"""What all recipes share: formats, roles, the checks of their fields."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quaver import formats
from quaver.errors import RecipeError

BackwardOverride = Literal["high_precision", "dequantized"] | None
"""What a backward pass computes with instead of quantized operands; None: with those."""

Check = tuple[str, bool, str]
"""A field, whether it holds what it must, and what it must hold."""


class Dtypes(NamedTuple):
    """The torch dtypes of the forward operands and of the gradients, and their largest values."""

    forward: torch.dtype
    backward: torch.dtype

    @property
    def max_fwd(self) -> float:
        """The largest value of the forward dtype."""
        return formats.MAX[self.forward]

    @property
    def max_bwd(self) -> float:
        """The largest value of the gradients' dtype."""
        return formats.MAX[self.backward]


class Format(enum.Enum):
    """FP8 formats of a recipe: of the forward operands, and of the gradients."""

    E4M3 = Dtypes(formats.E4M3, formats.E4M3)
    E5M2 = Dtypes(formats.E5M2, formats.E5M2)
    HYBRID = Dtypes(formats.E4M3, formats.E5M2)

    def dtype(self, mode: str) -> torch.dtype:
        """The torch dtype in `mode`, "forward" or "backward"."""
        return self.value[0] if mode == "forward" else self.value[1]


@dataclass(frozen=True)
class Role:
    """Which tensor of which module a quantizer is for.

    Attributes:
        tensor: "input", "weight" or "grad_output".
        module_name: where the module stands in its model; "" if unknown.
        module_type: the name of its class.
    """

    tensor: str
    module_name: str = ""
    module_type: str = ""


class Recipe:
    """Base of all recipes."""

    backward_override: BackwardOverride = None
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return False


def check_fields(recipe: object, checks: Iterable[Check]) -> None:
    """Raise for the first field that does not hold what it must.

    Raises:
        RecipeError: names the recipe, the field, what is expected and what was given.
    """
    for field, holds, expected in checks:
        if not holds:
            raise RecipeError(
                f"{type(recipe).__name__}.{field} must be {expected}, "
                f"not {getattr(recipe, field)!r}"
            )


def format_check(fp8_format: Format) -> Check:
    """`fp8_format` is one that can be trained with."""
    return (
        "fp8_format",
        fp8_format in (Format.HYBRID, Format.E4M3),
        "Format.HYBRID or Format.E4M3 (E5M2 is too coarse for the forward operands)",
    )


def attention_checks(
    fp8_dpa: bool, fp8_mha: bool, *, one_scale: bool, override: BackwardOverride = None
) -> tuple[Check, Check]:
    """FP8 attention is refused where it would be ignored.

    Args:
        one_scale: whether each tensor has one scale, and so serves products in both directions.
        override: of the backward.
    """
    expected = "True or False"
    if not one_scale:
        expected = "False: FP8 attention needs a scale a tensor, of DelayedScaling or "
        expected += "Float8CurrentScaling"
    elif override == "high_precision":
        expected = 'False with backward_override="high_precision"'
    holds = isinstance(fp8_dpa, bool) and (not fp8_dpa or expected == "True or False")
    handed = isinstance(fp8_mha, bool) and (not fp8_mha or (holds and fp8_dpa))
    reason = "True or False, and True only with fp8_dpa=True: it hands that output on"
    return ("fp8_dpa", holds, expected), ("fp8_mha", handed, reason)


def override_check(backward_override: BackwardOverride) -> Check:
    """`backward_override` is a known one."""
    return (
        "backward_override",
        backward_override in (None, "high_precision", "dequantized"),
        'None, "high_precision" or "dequantized"',
    )


def is_int(value: object) -> bool:
    """Whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_amount(value: object) -> bool:
    """Whether `value` is a number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
