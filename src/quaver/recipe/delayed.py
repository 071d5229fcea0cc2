"""DelayedScaling: scales from the amaxes of earlier steps."""

import warnings
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import torch

from quaver.recipe.base import (
    Check,
    Format,
    Recipe,
    attention_checks,
    check_fields,
    format_check,
    is_int,
)

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]
ScaleAlgorithm = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]

_LARGEST_MARGIN = 100
"""Beyond, fp8_max * 2^-margin leaves float32."""

_warned_fields: set[str] = set()


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amaxes of earlier steps.

    scale = (fp8_max / 2^margin) / amax, where amax is taken from the history of a tensor's
    max|x| (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.3).

    Args:
        margin: the scale is divided by 2^margin, which leaves room above the largest amax.
        fp8_format: HYBRID (E4M3 forward, E5M2 for gradients) or E4M3.
        amax_history_len: how many updates the history remembers, at least 1.
        amax_compute_algo: "max" over the history, "most_recent", or a function from the history
            [amax_history_len, n] to the amaxes [n].
        scaling_factor_compute_algo: a function (amax [n], scale [n], fp8_max, recipe) -> scale [n]
            in place of the formula above.
        reduce_amax: MAX-reduce the amaxes over the amax reduction group when there is one.
        fp8_dpa: quantize inside of DotProductAttention too: its operands, weights and output.
        fp8_mha: with fp8_dpa: hand that output on as it is quantized, so that the projection behind
            it casts it no second time.
        first_scale: what a tensor whose scale was never updated is cast with: "amax" takes its own
            amax for that call, "one" takes 1 (TransformerEngine's way).
        interval, override_linear_precision: of older callers; accepted with a warning, ignored.

    Raises:
        RecipeError: a field holds what it must not.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    first_scale: Literal["amax", "one"] = "amax"
    interval: InitVar[Any] = None
    override_linear_precision: InitVar[Any] = None

    def __post_init__(self, interval: Any, override_linear_precision: Any) -> None:
        _warn_if_given("interval", interval)
        _warn_if_given("override_linear_precision", override_linear_precision)
        algorithm = self.amax_compute_algo
        checks: tuple[Check, ...] = (
            (
                "margin",
                is_int(self.margin) and abs(self.margin) <= _LARGEST_MARGIN,
                f"an integer from -{_LARGEST_MARGIN} to {_LARGEST_MARGIN}",
            ),
            format_check(self.fp8_format),
            (
                "amax_history_len",
                is_int(self.amax_history_len) and self.amax_history_len >= 1,
                "an integer of at least 1",
            ),
            (
                "amax_compute_algo",
                callable(algorithm) or algorithm in ("max", "most_recent"),
                '"max", "most_recent" or a function',
            ),
            (
                "scaling_factor_compute_algo",
                self.scaling_factor_compute_algo is None
                or callable(self.scaling_factor_compute_algo),
                "None or a function",
            ),
            *attention_checks(self.fp8_dpa, self.fp8_mha, one_scale=True),
            ("first_scale", self.first_scale in ("amax", "one"), '"amax" or "one"'),
        )
        check_fields(self, checks)

    def delayed(self) -> bool:
        """Whether scales come from earlier steps; they do."""
        return True


def _warn_if_given(field: str, value: object) -> None:
    if value is not None and field not in _warned_fields:
        _warned_fields.add(field)
        warnings.warn(f"DelayedScaling({field}=...) has no effect and can be dropped", stacklevel=4)


DEFAULT_RECIPE = DelayedScaling()
"""What `recipe=None` means where no other recipe is attached."""
