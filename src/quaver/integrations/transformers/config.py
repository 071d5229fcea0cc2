"""QuaverConfig: what transformers is told, and what stands in a saved model's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from quaver.conversion import DEFAULT_EXCLUDE, ConversionError, Rule
from quaver.errors import RecipeError
from quaver.recipe import Recipe, named_recipe

METHOD = "quaver"
_FORMAT = 1


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Load a model of transformers straight into Quaver's layers.

    `AutoModelForCausalLM.from_pretrained(path, quantization_config=QuaverConfig("mxfp8"))` gives
    what `quaver.convert` makes of the loaded model, but for memory: each weight is quantized on
    its own device as soon as it is read, before the next one is.

    Args:
        recipe: "delayed", "current", "block", "mxfp8" or "nvfp4"; attached to the layers. With
            "delayed", calibrate the model before inference.
        weights: "quantize" keeps FP8 or FP4 weights only. They are frozen: for inference, and for
            adapters such as LoRA. "keep" leaves them in high precision and trainable.
        keep_in_high_precision: globs on the qualified names of layers that are left as they are,
            as `exclude` of `quaver.convert`; the default is the output layer, `lm_head`.
        recipe_options: arguments of the recipe's class, such as {"amax_history_len": 16}; what
            JSON can hold.

    Raises:
        RecipeError: no such recipe, or one of its options is wrong.
        ConversionError: another argument is wrong.
    """

    def __init__(
        self,
        recipe: str = "current",
        *,
        weights: Literal["keep", "quantize"] = "quantize",
        keep_in_high_precision: str | Iterable[str] = DEFAULT_EXCLUDE,
        recipe_options: dict[str, Any] | None = None,
        quant_method: str = METHOD,
        format_version: int = _FORMAT,
    ) -> None:
        if weights not in ("keep", "quantize"):
            raise ConversionError(f'weights must be "keep" or "quantize", not {weights!r}')
        if quant_method != METHOD or format_version != _FORMAT:
            raise ConversionError(
                f"this is {METHOD!r} version {_FORMAT}, but the model was saved with "
                f"{quant_method!r} version {format_version!r}; update quaver to load it"
            )
        if isinstance(recipe, Recipe):
            raise RecipeError(
                f"recipe must be a name, such as 'mxfp8', not a {type(recipe).__name__}: it goes "
                "into config.json; give what differs from the defaults as recipe_options"
            )
        patterns = keep_in_high_precision
        if not isinstance(patterns, Iterable):
            raise ConversionError(
                f"keep_in_high_precision must be globs, such as ['lm_head'], not {patterns!r}; "
                "[] keeps none"
            )
        self.quant_method = quant_method
        self.format_version = format_version
        self.recipe = recipe
        self.recipe_options = _checked_options(recipe_options)
        self.weights = weights
        self.keep_in_high_precision = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in self.keep_in_high_precision:
            if not isinstance(pattern, str):
                raise ConversionError(
                    f"keep_in_high_precision must hold globs, such as 'lm_head', not {pattern!r}"
                )
            Rule(pattern, skip=True)
        self.make_recipe()

    def make_recipe(self) -> Recipe:
        """The recipe that the two fields name."""
        return named_recipe(self.recipe, **self.recipe_options)


def _checked_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of the options, which a saved model's config.json can hold."""
    if not isinstance(options, dict | None):
        raise RecipeError(
            f"recipe_options must be a dict, such as {{'amax_history_len': 16}}, not {options!r}"
        )
    for name, value in (options or {}).items():
        try:
            json.dumps(value)
        except TypeError:
            raise RecipeError(
                f"recipe_options must be what JSON can hold, since they go into config.json, but "
                f"{name} is {value!r}; a format is given by its name, such as 'E4M3'"
            ) from None
    return dict(options or {})
