"""What a conversion did, layer by layer, as values and as a readable table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from quaver.conversion.table import render
from quaver.recipe import Recipe

WeightsOutcome = Literal["kept", "quantized", "dequantized"]


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer whose class was swapped, or that was Quaver's already and got a recipe.

    Args:
        name: qualified name, of its first occurrence if the model holds it several times.
        class_before, class_after: names of the classes, with their modules.
        device: of its weight; None if it has none.
        recipe: the recipe now attached; None if it needs an `autocast` to run in FP8.
        weights: "kept" in high precision, "quantized" to FP8, or "dequantized" from it.
        note: anything else that a user should know; may be empty.
        gain: the predicted time of forward and backward in bf16 over that in FP8; None where FP8
            products are emulated.
    """

    name: str
    class_before: str
    class_after: str
    device: torch.device | None
    recipe: Recipe | None
    weights: WeightsOutcome
    note: str = ""
    gain: float | None = None


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer that was left as it is, and why."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class FusedModule:
    """A module that does the work of several since the conversion.

    Args:
        name: qualified name of the module whose place it takes.
        class_name: its class.
        replaces: the names of those whose work it does.
        device, recipe, weights, note, gain: as in `ConvertedLayer`.
    """

    name: str
    class_name: str
    replaces: tuple[str, ...]
    device: torch.device | None
    recipe: Recipe | None
    weights: WeightsOutcome
    note: str = ""
    gain: float | None = None


@dataclass(frozen=True)
class AttachedAttention:
    """An attention of Quaver's whose recipe the conversion set.

    Args:
        recipe: the recipe now attached, with fp8_dpa; None: it was taken off, and the attention
            runs in high precision.
        backend: what computes it, and why.
    """

    name: str
    class_name: str
    recipe: Recipe | None
    backend: str


@dataclass(frozen=True)
class UnfusedNorm:
    """A norm that was not fused with what it feeds, although it looks as if it could be, and why.

    Args:
        class_name: of the block that holds it.
    """

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class BypassedLayer:
    """A converted layer that its parent does not always call, so that FP8 does not always run."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class AdjustedModule:
    """A parent of converted layers, of which a setting was changed so that it calls them."""

    name: str
    class_name: str
    change: str


@dataclass(frozen=True)
class UnmatchedRule:
    """A rule that decided about no layer: `given_as` says where it stood, such as "rules[1]"."""

    given_as: str
    match: str
    matches: str


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` or `convert_back` did; `str(report)` is a table."""

    converted: tuple[ConvertedLayer, ...] = ()
    skipped: tuple[SkippedLayer, ...] = ()
    bypassed: tuple[BypassedLayer, ...] = ()
    adjusted: tuple[AdjustedModule, ...] = ()
    unmatched_rules: tuple[UnmatchedRule, ...] = ()
    notes: tuple[str, ...] = field(default=())
    fused: tuple[FusedModule, ...] = ()
    unfused: tuple[UnfusedNorm, ...] = ()
    attention: tuple[AttachedAttention, ...] = ()

    def __str__(self) -> str:
        sections = [self._converted_table()] if self.converted or not self.fused else []
        if self.fused:
            sections.append(self._fused_table())
        if self.attention:
            sections.append(self._attention_table())
        if self.unfused:
            rows = [(norm.name, norm.class_name, norm.reason) for norm in self.unfused]
            sections.append(render("Norms not fused", ("norm", "block", "why"), rows))
        if self.skipped:
            rows = [(layer.name, layer.class_name, layer.reason) for layer in self.skipped]
            sections.append(render("Left as they are", ("layer", "class", "why"), rows))
        if self.bypassed:
            rows = [(layer.name, layer.class_name, layer.reason) for layer in self.bypassed]
            sections.append(render("Bypassed by their parents", ("layer", "class", "how"), rows))
        if self.adjusted:
            rows = [(module.name, module.class_name, module.change) for module in self.adjusted]
            sections.append(render("Parents adjusted", ("module", "class", "change"), rows))
        if self.unmatched_rules:
            rows = [(rule.given_as, rule.match, rule.matches) for rule in self.unmatched_rules]
            title = "Rules that decided nothing"
            sections.append(render(title, ("rule", "pattern", "matches"), rows))
        sections.extend(self.notes)
        return "\n".join(sections)

    def _converted_table(self) -> str:
        if not self.converted:
            return "No layer was converted."
        recipes = recipe_labels(layer.recipe for layer in self.converted)
        rows = [
            (
                layer.name,
                f"{layer.class_before} → {layer.class_after}",
                str(layer.device),
                recipes[layer.recipe],
                layer.weights,
                "" if layer.gain is None else f"{layer.gain:.2f}×",
                layer.note,
            )
            for layer in self.converted
        ]
        columns = ("layer", "class", "device", "recipe", "weights", "gain", "note")
        return render(f"{counted(rows)} converted", columns, rows) + recipe_legend(recipes)

    def _fused_table(self) -> str:
        recipes = recipe_labels(module.recipe for module in self.fused)
        rows = [
            (
                module.name,
                module.class_name,
                _short(module.replaces),
                str(module.device),
                recipes[module.recipe],
                module.weights,
                "" if module.gain is None else f"{module.gain:.2f}×",
                module.note,
            )
            for module in self.fused
        ]
        columns = ("module", "class", "does the work of", "device", "recipe", "weights")
        table = render("Fused", (*columns, "gain", "note"), rows)
        return table + recipe_legend(recipes)

    def _attention_table(self) -> str:
        recipes = recipe_labels(module.recipe for module in self.attention)
        rows = [
            (
                module.name,
                module.class_name,
                recipes[module.recipe],
                short_backend(module.backend),
            )
            for module in self.attention
        ]
        table = render("Attention", ("module", "class", "recipe", "backend"), rows)
        backends = backend_legend(module.backend for module in self.attention)
        return table + recipe_legend(recipes) + backends


def _short(names: Sequence[str]) -> str:
    """The names, without the parts that all of them begin with."""
    parts = [name.split(".") for name in names]
    same = [len(set(step)) == 1 for step in zip(*parts, strict=False)]
    shared = [*same, False].index(False)
    return ", ".join(".".join(part[shared:]) for part in parts)


def class_name(cls: type) -> str:
    """`cls` with its top package, as people call it: "torch Linear", "quaver Linear"."""
    return f"{cls.__module__.split('.')[0]} {cls.__qualname__}"


def counted(layers: Sequence[object]) -> str:
    """How many layers, in words."""
    return f"{len(layers)} layer" + ("s" if len(layers) != 1 else "")


def recipe_labels(recipes: Iterable[Recipe | None]) -> dict[Recipe | None, str]:
    """A short label for each different recipe: its class, numbered where there are several."""
    distinct = list(dict.fromkeys(recipes))
    classes = [type(recipe).__name__ for recipe in distinct]
    labels: dict[Recipe | None, str] = {}
    for recipe, name in zip(distinct, classes, strict=True):
        number = f" #{sum(label.startswith(name) for label in labels.values()) + 1}"
        several = classes.count(name) > 1
        labels[recipe] = "–" if recipe is None else name + (number if several else "")
    return labels


def recipe_legend(labels: dict[Recipe | None, str]) -> str:
    """The recipes in full, one a line, for below a table that has their labels."""
    return "".join(f"\n{label}: {recipe}" for recipe, label in labels.items() if recipe is not None)


def short_backend(backend: str) -> str:
    """The name of an attention's backend, without the reason for it."""
    return backend.partition(" (")[0]


def backend_legend(backends: Iterable[str]) -> str:
    """The reasons for backends, one a line, for below a table that has their names."""
    reasons = [backend for backend in dict.fromkeys(backends) if backend != short_backend(backend)]
    return "".join(f"\n{reason}" for reason in reasons)
