"""`transformer_engine.common.recipe`: Quaver's recipes with the options that scripts pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar

from quaver import recipe as native
from quaver.errors import RecipeError
from quaver.integrations.transformer_engine.options import transformer_engine_name
from quaver.recipe import Format, Recipe

_NAME = "transformer_engine.common.recipe"


@transformer_engine_name(_NAME)
@dataclass(frozen=True)
class MMParams:
    """Options of a product: whether it sums in full precision all along."""

    use_split_accumulator: bool = True


@transformer_engine_name(_NAME)
@dataclass(frozen=True)
class QParams:
    """Options of a quantization."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


C = TypeVar("C", bound=type)


def _only_at_default(**options: Any) -> Callable[[C], C]:
    """Class decorator: options that the recipe does not have are taken with these values alone."""

    def accept(cls: C) -> C:
        init = cls.__init__  # type: ignore[misc]

        @wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name, only in options.items():
                value = given.pop(name, only)
                if value != only:
                    raise RecipeError(f"{cls.__name__}.{name} must be {only!r}, not {value!r}")
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return accept


_FAST, _ACCURATE = MMParams(use_split_accumulator=False), MMParams()


class _Kinds:
    """The questions that scripts ask of a recipe."""

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return isinstance(self, native.DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether there is one scale a tensor, from its own amax."""
        return isinstance(self, native.Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        """Whether there is one scale a tensor."""
        return isinstance(self, native.DelayedScaling | native.Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        """Whether there is a float32 scale a block."""
        return isinstance(self, native.Float8BlockScaling)

    def mxfp8(self) -> bool:
        """Whether it is MXFP8."""
        return isinstance(self, native.MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        """Whether it is NVFP4."""
        return isinstance(self, native.NVFP4BlockScaling)

    def custom(self) -> bool:
        """Whether a function chooses the quantizers."""
        return isinstance(self, native.CustomRecipe)


@transformer_engine_name(_NAME)
@_only_at_default(backward_override=None)
@dataclass(frozen=True)
class DelayedScaling(_Kinds, native.DelayedScaling):
    """quaver.recipe.DelayedScaling, whose first cast of a tensor takes scale 1."""

    first_scale: Literal["amax", "one"] = "one"


@transformer_engine_name(_NAME)
@_only_at_default(fp8_gemm_fprop=_FAST, fp8_gemm_dgrad=_ACCURATE, fp8_gemm_wgrad=_ACCURATE)
@dataclass(frozen=True)
class Float8CurrentScaling(_Kinds, native.Float8CurrentScaling):
    """quaver.recipe.Float8CurrentScaling."""


@transformer_engine_name(_NAME)
@_only_at_default(fp8_gemm_fprop=_ACCURATE, fp8_gemm_dgrad=_ACCURATE, fp8_gemm_wgrad=_ACCURATE)
@dataclass(frozen=True)
class Float8BlockScaling(_Kinds, native.Float8BlockScaling):
    """quaver.recipe.Float8BlockScaling."""


@transformer_engine_name(_NAME)
@dataclass(frozen=True)
class MXFP8BlockScaling(_Kinds, native.MXFP8BlockScaling):
    """quaver.recipe.MXFP8BlockScaling; `margin` must be 0."""

    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin != 0:
            raise RecipeError(
                f"MXFP8BlockScaling.margin must be 0: scales are powers of two, not {self.margin!r}"
            )


@transformer_engine_name(_NAME)
@_only_at_default(fp8_format=Format.E4M3)
@dataclass(frozen=True)
class NVFP4BlockScaling(_Kinds, native.NVFP4BlockScaling):
    """quaver.recipe.NVFP4BlockScaling."""


@transformer_engine_name(_NAME)
@dataclass(frozen=True)
class CustomRecipe(_Kinds, native.CustomRecipe):
    """quaver.recipe.CustomRecipe."""


_DEFAULT = DelayedScaling()


def default_recipe() -> Recipe:
    """What an `autocast` without a recipe quantizes with, on every machine."""
    return _DEFAULT


def contents() -> dict[str, Any]:
    """The names of the module."""
    return {
        "Format": Format,
        "Recipe": Recipe,
        "MMParams": MMParams,
        "QParams": QParams,
        "DelayedScaling": DelayedScaling,
        "Float8CurrentScaling": Float8CurrentScaling,
        "Float8BlockScaling": Float8BlockScaling,
        "MXFP8BlockScaling": MXFP8BlockScaling,
        "NVFP4BlockScaling": NVFP4BlockScaling,
        "CustomRecipe": CustomRecipe,
    }
