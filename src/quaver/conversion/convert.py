"""`convert`: the linear layers of a model become Quaver's, in place."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Literal

from torch import nn

from quaver.conversion.attach import attach_region
from quaver.conversion.errors import ConversionError
from quaver.conversion.gain import DEFAULT_SPEED, Speed
from quaver.conversion.parents import adjust, adjustable_parents
from quaver.conversion.places import weights_of
from quaver.conversion.plan import LayerPlan, Plan, make_plan
from quaver.conversion.report import AdjustedModule, ConversionReport, ConvertedLayer, class_name
from quaver.conversion.rules import DEFAULT_EXCLUDE, Matches, Rule, RuleList
from quaver.conversion.swap import Snapshot, swap_in
from quaver.conversion.weights import quantize_weights
from quaver.recipe import Recipe
from quaver.tensors import QuantizedTensor


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
) -> ConversionReport:
    """Make the linear layers of `model` Quaver's, in place, and report on each of them.

    Layers of class nn.Linear and transformers' Conv1D get another class, and nothing else of them
    changes: parameters (the same objects, tied ones too), names, hooks, training mode, device,
    dtype and `requires_grad` stay. It works before and after accelerate's `dispatch_model`.
    A second call converts what is left and replaces the recipe.

    Args:
        model: changed in place; given as a single layer, it is converted itself.
        recipe: with one, each call of `model` runs in FP8, and its scales are updated at the end
            of the call, without any `autocast` (which still has the last word where there is
            one). None: the layers run in FP8 inside `quaver.autocast` only.
        weights: "keep" leaves them in high precision: trainable, and `convert_back` is exact.
            "quantize" replaces them by FP8 ones, which saves memory; a weight that something
            else reads too is kept, and the report says so.
        include: globs or functions, as in `Rule`; if given, only layers that match are converted.
        exclude: globs or functions; layers that match are left. The default is the output layer
            of language models, `lm_head`: give () to convert that as well, and
            `(*DEFAULT_EXCLUDE, ...)` to leave more.
        rules: tried in order before `exclude` and `include`; the first that matches decides.
        include_subclasses: convert subclasses of those two classes as well; Quaver's forward
            then replaces theirs.
        skip_slow: leave the layers that are predicted to be slower in FP8 than in bf16, forward
            and backward; all of them where FP8 products are emulated.
        tokens: how many rows the input of a call has, for the predicted gains.

    Returns:
        What was converted, what was not and why, and which rules decided nothing.

    Raises:
        ConversionError: an argument or a rule is wrong, or a weight cannot be quantized. The
            model is then as it was before.
    """
    _check_arguments(model, recipe, weights, tokens)
    rule_list = RuleList(rules, include, exclude)
    plan = make_plan(
        model,
        recipe,
        rule_list,
        quantize=weights == "quantize",
        include_subclasses=include_subclasses,
        speed=Speed(tokens, skip_slow),
    )
    classes = {layer.module: class_name(type(layer.module)) for layer in plan.layers}
    adjusted = _carry_out(model, plan)
    return ConversionReport(
        converted=tuple(_describe(layer, classes[layer.module]) for layer in plan.layers),
        skipped=tuple(plan.skipped),
        bypassed=tuple(plan.bypassed),
        adjusted=adjusted,
        unmatched_rules=rule_list.unmatched(),
        notes=_notes(plan),
    )


def _check_arguments(model: object, recipe: object, weights: object, tokens: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"model must be an nn.Module, not {type(model).__name__}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ConversionError(
            f"recipe must be None or a recipe such as DelayedScaling(), not {recipe!r}"
        )
    if weights not in ("keep", "quantize"):
        raise ConversionError(f'weights must be "keep" or "quantize", not {weights!r}')
    if not isinstance(tokens, int) or tokens < 1:
        raise ConversionError(f"tokens must be a number of rows from 1 on, not {tokens!r}")


def _carry_out(model: nn.Module, plan: Plan) -> tuple[AdjustedModule, ...]:
    """Do what `plan` says; on an error everything goes back first."""
    adjusted = []
    with ExitStack() as undo:
        for layer in plan.layers:
            undo.callback(Snapshot.of(layer.module).restore)
            swap_in(layer.module, layer.name, layer.recipe).set_weight_scale()
        for name, parent in adjustable_parents(model, {layer.module for layer in plan.layers}):
            undo.callback(Snapshot.of(parent).restore)
            change = adjust(parent)
            if change:
                adjusted.append(AdjustedModule(name, class_name(type(parent)), change))
        quantize_weights({layer.name: layer.converted for layer in plan.layers if layer.quantize})
        if any(layer.recipe is not None for layer in plan.layers):
            attach_region(model)
        undo.pop_all()
    return tuple(adjusted)


def _describe(layer: LayerPlan, class_before: str) -> ConvertedLayer:
    module = layer.converted
    weight = next(iter(weights_of(module).values()), None)
    return ConvertedLayer(
        name=layer.name,
        class_before=class_before,
        class_after=class_name(type(module)),
        device=None if weight is None else weight.device,
        recipe=module.recipe,
        weights="quantized" if isinstance(weight, QuantizedTensor) else "kept",
        note="; ".join(layer.notes),
        gain=layer.gain,
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    without = [layer for layer in plan.layers if layer.converted.recipe is None]
    if not plan.layers:
        return ()
    if not without:
        return ("Each call of the model runs these layers in FP8, without any autocast.",)
    which = "These layers" if len(without) == len(plan.layers) else "Layers without a recipe"
    return (
        f"{which} run in FP8 inside quaver.autocast only; convert(model, recipe) attaches one.",
    )
