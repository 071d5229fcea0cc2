"""The carrying out of a plan, all or nothing, and the report on it."""

from contextlib import ExitStack

import torch
from torch import nn

from quaver.conversion.attach import attach_region
from quaver.conversion.fusion.swap import FusionPlan, fuse, unfuse
from quaver.conversion.gain import predicted_gain
from quaver.conversion.parents import adjust, adjustable_parents
from quaver.conversion.places import weights_of
from quaver.conversion.plan import LayerPlan, Plan
from quaver.conversion.report import (
    AdjustedModule,
    ConversionReport,
    ConvertedLayer,
    FusedModule,
    UnmatchedRule,
    WeightsOutcome,
    class_name,
)
from quaver.conversion.swap import Snapshot, swap_in
from quaver.conversion.weights import quantize_weights
from quaver.nn.weights import QuantizedWeights
from quaver.recipe import Recipe
from quaver.tensors import QuantizedTensor


def carry_out(
    model: nn.Module, plan: Plan, tokens: int, unmatched: tuple[UnmatchedRule, ...]
) -> ConversionReport:
    """Do what `plan` says; on an error everything goes back first.

    Args:
        tokens: of a call, for the gains of fused modules.
        unmatched: for the report.
    """
    classes = {layer.module: class_name(type(layer.module)) for layer in plan.layers}
    adjusted = _change(model, plan)
    return ConversionReport(
        converted=tuple(_describe(layer, classes[layer.module]) for layer in plan.layers),
        skipped=tuple(plan.skipped),
        bypassed=tuple(plan.bypassed),
        adjusted=adjusted,
        unmatched_rules=unmatched,
        notes=(*_notes([each.recipe for each in _converted(plan)]), *plan.notes),
        fused=tuple(_describe_fusion(fusion, tokens) for fusion in plan.fusions),
        unfused=tuple(plan.unfused),
        attention=tuple(each.describe() for each in plan.attention),
    )


def _change(model: nn.Module, plan: Plan) -> tuple[AdjustedModule, ...]:
    adjusted = []
    quantized: dict[str, QuantizedWeights] = {}
    with ExitStack() as undo:
        for fusion in plan.fusions:
            fused = fuse(fusion)
            undo.callback(unfuse, fused)
            fused.set_weight_scale()
            if fusion.quantize:
                quantized[fusion.name] = fused
        for layer in plan.layers:
            undo.callback(Snapshot.of(layer.module).restore)
            swap_in(layer.module, layer.name, layer.recipe).set_weight_scale()
            if layer.quantize:
                quantized[layer.name] = layer.converted
        for attention in plan.attention:
            undo.callback(Snapshot.of(attention.module).restore)
            attention.carry_out()
        for name, parent in adjustable_parents(model, {layer.module for layer in plan.layers}):
            undo.callback(Snapshot.of(parent).restore)
            change = adjust(parent)
            if change:
                adjusted.append(AdjustedModule(name, class_name(type(parent)), change))
        quantize_weights(quantized)
        recipes = [layer.recipe for layer in plan.layers] + [each.recipe for each in plan.fusions]
        recipes += [each.recipe for each in plan.attention]
        if any(recipe is not None for recipe in recipes):
            attach_region(model)
        undo.pop_all()
    return tuple(adjusted)


def _converted(plan: Plan) -> list[QuantizedWeights]:
    return [*(layer.converted for layer in plan.layers), *(each.converted for each in plan.fusions)]


def _describe(layer: LayerPlan, class_before: str) -> ConvertedLayer:
    device, outcome = _weights(layer.converted)
    return ConvertedLayer(
        name=layer.name,
        class_before=class_before,
        class_after=class_name(type(layer.module)),
        device=device,
        recipe=layer.converted.recipe,
        weights=outcome,
        note="; ".join(layer.notes),
        gain=layer.gain,
    )


def _describe_fusion(fusion: FusionPlan, tokens: int) -> FusedModule:
    device, outcome = _weights(fusion.converted)
    return FusedModule(
        name=fusion.name,
        class_name=class_name(type(fusion.host)),
        replaces=fusion.replaces,
        device=device,
        recipe=fusion.converted.recipe,
        weights=outcome,
        note=fusion.note,
        gain=predicted_gain(fusion.host, tokens),
    )


def _weights(module: QuantizedWeights) -> tuple[torch.device | None, WeightsOutcome]:
    weight = next(iter(weights_of(module).values()), None)
    outcome: WeightsOutcome = "quantized" if isinstance(weight, QuantizedTensor) else "kept"
    return None if weight is None else weight.device, outcome


def _notes(recipes: list[Recipe | None]) -> tuple[str, ...]:
    if not recipes:
        return ()
    if None not in recipes:
        return ("Each call of the model runs these layers in FP8, without any autocast.",)
    which = "Layers without a recipe" if any(recipes) else "These layers"
    return (
        f"{which} run in FP8 inside quaver.autocast only; convert(model, recipe) attaches one.",
    )
