"""Attention under a conversion: Quaver's own modules get a recipe that quantizes inside of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quaver.conversion.places import places_of
from quaver.conversion.report import AttachedAttention, SkippedLayer, class_name
from quaver.conversion.rules import RuleList
from quaver.conversion.swap import RECORD, Conversion
from quaver.errors import QuaverError
from quaver.nn import DotProductAttention
from quaver.recipe import Recipe

NO_ATTENTION = (
    "fp8_dpa=True has no effect here: no DotProductAttention of Quaver's was given such a recipe, "
    "and attention of other classes stays in high precision."
)


@dataclass
class AttentionPlan:
    """One attention whose attached recipe changes; None: it is detached."""

    name: str
    module: DotProductAttention
    recipe: Recipe | None

    def carry_out(self) -> None:
        """Attach the recipe, and note what was attached before."""
        module = self.module
        module.__dict__.setdefault(RECORD, Conversion(None, module.recipe))
        module.recipe = self.recipe
        module.qualified_name = self.name

    def describe(self) -> AttachedAttention:
        """For the report."""
        module = self.module
        backend = str(module.backend_for())
        return AttachedAttention(self.name, class_name(type(module)), module.recipe, backend)


def plan_attention(
    model: nn.Module, recipe: Recipe | None, rules: RuleList
) -> tuple[list[AttentionPlan], list[SkippedLayer], list[str]]:
    """What changes of the attention modules, which of them are left, and notes for the report.

    The rules decide about them by name as about layers. A recipe without fp8_dpa takes the place
    of one with it, and leaves the attention in high precision.
    """
    plans, skipped = [], []
    given = rules.recipes if recipe is None else [recipe, *rules.recipes]
    wanted = any(each.fp8_dpa for each in given)
    for module, places in places_of(model).items():
        if not isinstance(module, DotProductAttention) or not (wanted or module.recipe):
            continue
        decision = rules.decide([place.name for place in places], module)
        chosen = decision.recipe or recipe
        if chosen is None:
            continue
        reason = decision.skip_reason or _refusal(module, chosen)
        target = chosen if chosen.fp8_dpa else None
        if reason and chosen.fp8_dpa:
            skipped.append(SkippedLayer(places[0].name, class_name(type(module)), reason))
        elif not reason and (target is not None or module.recipe is not None):
            plans.append(AttentionPlan(places[0].name, module, target))
    attached = any(plan.recipe is not None for plan in plans)
    return plans, skipped, [NO_ATTENTION] if wanted and not attached else []


def _refusal(module: DotProductAttention, recipe: Recipe) -> str:
    if not recipe.fp8_dpa:
        return ""
    try:
        module.backend_for(quantized=True)
    except QuaverError as error:
        return str(error)
    return ""
