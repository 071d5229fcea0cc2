"""What a conversion is going to do, decided completely before anything changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from quaver.conversion.attention import AttentionPlan
from quaver.conversion.errors import ConversionError
from quaver.conversion.fusion.swap import FusionPlan
from quaver.conversion.gain import DEFAULT_SPEED, Speed, predicted_gain, slow_reason
from quaver.conversion.parents import ChildUse, weight_reads
from quaver.conversion.places import Place, places_of, users_of_parameters, weights_of
from quaver.conversion.report import BypassedLayer, SkippedLayer, UnfusedNorm, class_name
from quaver.conversion.rules import RuleList
from quaver.conversion.swap import has_replaced_forward, has_twin, is_exact_twin, is_transposed
from quaver.nn.weights import QuantizedWeights
from quaver.recipe import Recipe
from quaver.tensors import QuantizedTensor

NO_VALUES_YET = "no values yet; its scale comes from its first use"
"""The note on a layer whose weight is on the meta device."""

_HIGH_PRECISION = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class LayerPlan:
    """One layer that is converted.

    Attributes:
        quantize: whether its weight becomes FP8 now.
        gain: the predicted one, where its device multiplies FP8.
    """

    name: str
    module: nn.Module
    recipe: Recipe | None
    quantize: bool
    notes: list[str] = field(default_factory=list)
    gain: float | None = None

    @property
    def converted(self) -> QuantizedWeights:
        """The module, once it is Quaver's."""
        return cast(QuantizedWeights, self.module)


@dataclass
class Plan:
    """All that a conversion does, and what it leaves."""

    layers: list[LayerPlan] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    bypassed: list[BypassedLayer] = field(default_factory=list)
    fusions: list[FusionPlan] = field(default_factory=list)
    unfused: list[UnfusedNorm] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attention: list[AttentionPlan] = field(default_factory=list)


def make_plan(
    model: nn.Module,
    recipe: Recipe | None,
    rules: RuleList,
    *,
    quantize: bool,
    include_subclasses: bool,
    values_later: bool = False,
    speed: Speed = DEFAULT_SPEED,
) -> Plan:
    """Decide about every linear layer of `model`.

    Args:
        values_later: weights on the meta device are quantized when they are loaded.
        speed: how many tokens a call has, and whether layers that lose are skipped.

    Raises:
        ConversionError: a predicate failed, or a weight that is to be quantized is on no device.
    """
    plan = Plan()
    for module, places in places_of(model).items():
        if not has_twin(module):
            continue
        name = places[0].name
        decision = rules.decide([place.name for place in places], module)
        uses = _weight_reads(places)
        reason = decision.skip_reason or _obstacle(module, uses, include_subclasses)
        gain = None if reason else predicted_gain(module, speed.tokens)
        if speed.skip_slow and not reason and (gain is None or gain < 1.0):
            reason = slow_reason(module, gain, speed.tokens)
        if reason:
            if isinstance(module, QuantizedWeights):
                reason += "; it is Quaver's already and stays so"
            plan.skipped.append(SkippedLayer(name, class_name(type(module)), reason))
            continue
        layer = LayerPlan(name, module, decision.recipe or recipe, quantize, gain=gain)
        _note_aliases(layer, places)
        for parent, use in uses:
            _note_bypass(plan, layer, parent, use)
        plan.layers.append(layer)
    if quantize:
        _keep_shared_weights(model, plan.layers)
    for layer in plan.layers:
        _check_weight(layer, values_later)
    return plan


def _weight_reads(places: Sequence[Place]) -> list[tuple[nn.Module, ChildUse]]:
    """The parents whose own code computes with the weight of the module at `places`."""
    reads = []
    for place in places:
        if place.parent is not None:
            use = weight_reads(place.parent).get(place.child)
            if use is not None:
                reads.append((place.parent, use))
    return reads


def _obstacle(
    module: nn.Module, uses: list[tuple[nn.Module, ChildUse]], include_subclasses: bool
) -> str:
    """Why `module` cannot be converted; empty if it can."""
    for parent, use in uses:
        if not use.calls:
            return f"its parent {class_name(type(parent))} reads .weight itself and never calls it"
    if isinstance(module, QuantizedWeights):
        return ""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter of its own (weight norm, or a parametrization)"
    if is_lazy(weight):
        return "it has no weight yet; call the model once, then convert"
    if type(weight) is not nn.Parameter and not isinstance(weight, QuantizedTensor):
        return f"its weight is a {class_name(type(weight))}, not a plain parameter"
    if weight.dtype not in _HIGH_PRECISION:
        return f"its weight is {weight.dtype}, which is not high precision"
    if has_replaced_forward(module):
        return "its forward is replaced on the instance, so that a class's own would never run"
    if not is_exact_twin(module) and not include_subclasses:
        return "a subclass, whose own forward may differ; include_subclasses=True converts it"
    return ""


def _note_aliases(layer: LayerPlan, places: Sequence[Place]) -> None:
    if len(places) > 1:
        layer.notes.append("also " + ", ".join(place.name for place in places[1:]))


def _note_bypass(plan: Plan, layer: LayerPlan, parent: nn.Module, use: ChildUse) -> None:
    where = ", ".join(use.reads)
    parent_class = class_name(type(parent))
    reason = f"{parent_class} computes with .weight itself in {where}: there, without FP8"
    plan.bypassed.append(BypassedLayer(layer.name, class_name(type(layer.module)), reason))
    if layer.quantize:
        layer.quantize = False
        layer.notes.append("weight kept: its parent reads it")


def _keep_shared_weights(model: nn.Module, layers: list[LayerPlan]) -> None:
    """Quantize a shared weight only where all of its users are layers that will read FP8."""
    users = users_of_parameters(model)
    by_module = {layer.module: layer for layer in layers}
    for layer in layers:
        if not layer.quantize:
            continue
        weights = weights_of(layer.module)
        for user in (user for weight in weights.values() for user in users.get(id(weight), ())):
            other = by_module.get(user.module)
            shared = weights_of(user.module)
            if (
                other is None
                or user.parameter not in shared
                or not other.quantize
                or is_transposed(user.module) != is_transposed(layer.module)
                or [*map(id, shared.values())] != [*map(id, weights.values())]
            ):
                layer.notes.append(f"weight kept: tied to {user.name}")
                break
    for layer in layers:
        if any(note.startswith("weight kept: tied") for note in layer.notes):
            layer.quantize = False


def _check_weight(layer: LayerPlan, values_later: bool) -> None:
    weights = weights_of(layer.module).values()
    if weights and all(isinstance(weight, QuantizedTensor) for weight in weights):
        layer.quantize = False
        layer.notes.append("weight is FP8 already")
    if not any(weight.device.type == "meta" for weight in weights):
        return
    if layer.quantize and values_later:
        return
    if layer.quantize:
        raise ConversionError(
            f"weights='quantize' needs the values of {layer.name}.weight, but it is offloaded or "
            f"not loaded yet (device meta); convert before dispatch_model, or use weights='keep'"
        )
    layer.notes.append(NO_VALUES_YET)
