"""`convert`: the linear layers of a model become Quaver's, in place."""

from collections.abc import Iterable
from typing import Literal

from torch import nn

from quaver.conversion.attention import plan_attention
from quaver.conversion.carry_out import carry_out
from quaver.conversion.errors import ConversionError
from quaver.conversion.fusion.blocks import plan_fusions
from quaver.conversion.gain import DEFAULT_SPEED, Speed
from quaver.conversion.plan import make_plan
from quaver.conversion.report import ConversionReport
from quaver.conversion.rules import DEFAULT_EXCLUDE, Matches, Rule, RuleList
from quaver.recipe import Recipe


def convert(  # noqa: PLR0913 - every one of them is a keyword but two
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    weights: Literal["keep", "quantize"] = "keep",
    include: Matches | None = None,
    exclude: Matches = DEFAULT_EXCLUDE,
    rules: Iterable[Rule] = (),
    include_subclasses: bool = False,
    skip_slow: bool = False,
    tokens: int = DEFAULT_SPEED.tokens,
    fuse: bool = False,
) -> ConversionReport:
    """Make the linear layers of `model` Quaver's, in place, and report on each of them.

    nn.Linear and transformers' Conv1D get another class; their parameters (tied ones too), names,
    hooks, mode, device and dtype stay. A recipe with fp8_dpa goes to Quaver's DotProductAttention
    modules, too. It works before and after accelerate's `dispatch_model`. A second call converts
    what is left and replaces the recipe.

    Args:
        model: changed in place; given as a single layer, it is converted itself.
        recipe: with one, each call of `model` runs in FP8, and its scales are updated at its end;
            an `autocast` around it has the last word. None: in FP8 inside `autocast` only.
        weights: "keep" leaves them trainable in high precision, and `convert_back` is exact;
            "quantize" replaces them by FP8 ones, unless something else reads them too.
        include: globs or functions, as in `Rule`; if given, only layers that match are converted.
        exclude: layers to leave: the default is the output layer of language models, `lm_head`.
        rules: tried in order before `exclude` and `include`; the first that matches decides.
        include_subclasses: convert subclasses of those two classes too, replacing their forward.
        skip_slow: leave the layers that are predicted to be slower in FP8 than in bf16, forward
            and backward; all of them where FP8 products are emulated.
        tokens: how many rows the input of a call has, for the predicted gains.
        fuse: swap a norm and what it feeds for one `LayerNormLinear` or `LayerNormMLP`, where the
            model's code shows that it may be; this moves parameters, so optimizers come after it.

    Returns:
        What was converted and fused, what was not and why, and which rules decided nothing.

    Raises:
        ConversionError: an argument or a rule is wrong, or a weight cannot be quantized. The
            model is then as it was before.
    """
    _check_arguments(model, recipe, weights, tokens)
    rule_list = RuleList(rules, include, exclude)
    options = {"quantize": weights == "quantize", "include_subclasses": include_subclasses}
    plan = make_plan(model, recipe, rule_list, **options, speed=Speed(tokens, skip_slow))
    plan.attention, left, notes = plan_attention(model, recipe, rule_list)
    plan.skipped += left
    plan.notes += notes
    if fuse:
        plan_fusions(model, plan)
    return carry_out(model, plan, tokens, rule_list.unmatched())


def _check_arguments(model: object, recipe: object, weights: object, tokens: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"model must be an nn.Module, not {type(model).__name__}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ConversionError(
            "recipe must be None or a recipe such as DelayedScaling() or "
            f"named_recipe('mxfp8'), not {recipe!r}"
        )
    if weights not in ("keep", "quantize"):
        raise ConversionError(f'weights must be "keep" or "quantize", not {weights!r}')
    if not isinstance(tokens, int) or tokens < 1:
        raise ConversionError(f"tokens must be a number of rows from 1 on, not {tokens!r}")
