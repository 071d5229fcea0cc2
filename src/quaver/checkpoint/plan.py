"""What is to become of each tensor of a checkpoint that is converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch

from quaver.checkpoint.files import Folder
from quaver.checkpoint.states import pickled_states
from quaver.checkpoint.stored import StoredWeight, companions, stored_weights
from quaver.checkpoint.targets import DEQUANTIZED, Target
from quaver.errors import CheckpointError
from quaver.formats import E4M3

DEFAULT_EXCLUDE: tuple[str, ...] = tuple(
    "lm_head *.lm_head *embed* *wte *wpe shared *relative_attention_bias *norm* *.gate *_gate "
    "*router* score classifier *.classifier".split()
)
"""Layers that `convert_checkpoint` leaves alone: a checkpoint does not say which are linear, and
these are embeddings, output layers, norms and routers by their names."""

Action = Literal["quantize", "move", "requantize", "dequantize"]
"""Of high-precision weights; of FP8 ones: keep the payload bit for bit, dequantize and quantize
again, or dequantize."""

_HIGH = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Models of transformers whose layers are Conv1D, with the weight stored [in, out]."""


@dataclass
class Plan:
    """What is to become of a checkpoint's weights, by their names.

    Attributes:
        stored: FP8 weights of the source, all of them.
        actions: what happens to weights; others stay.
        left: other two-dimensional weights, with the reason.
        drop: scales, which go along with their weights.
        static: input scales by layer; empty if they are dynamic.
        dtype: of dequantized weights.
        pickles: states of training that are dropped.
        notes: what else a person should know.
    """

    stored: dict[str, StoredWeight]
    drop: set[str]
    dtype: torch.dtype
    actions: dict[str, Action] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    static: dict[str, float] = field(default_factory=dict)
    pickles: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def names(self, action: Action) -> tuple[str, ...]:
        """The weights to which `action` happens."""
        return tuple(name for name, chosen in self.actions.items() if chosen == action)

    def layers(self) -> list[str]:
        """The layers that are FP8 afterwards."""
        return [_layer(name) for name, chosen in self.actions.items() if chosen != "dequantize"]


def make_plan(
    folder: Folder,
    target: Target,
    include: Iterable[str] | None,
    exclude: Iterable[str],
    static_scales: Mapping[str, float] | None,
) -> Plan:
    """Decide about each tensor; of values only scales are read.

    Raises:
        CheckpointError: the source is not sound, or nothing of it would change.
    """
    config = folder.config()
    plan = Plan(stored_weights(folder), companions(folder), dtype_of(config))
    plan.pickles = pickled_states(folder)
    if plan.pickles:
        plan.notes.append(
            f"{len(plan.pickles)} scaling states of TransformerEngine's are dropped: they are "
            "pickles, and the format has no place for them"
        )
    choice = _Choice.of(include, exclude)
    if target.format == DEQUANTIZED and choice.own:
        raise CheckpointError(
            f"include and exclude say what is quantized; the format {DEQUANTIZED} takes neither"
        )
    if plan.stored:
        for weight in plan.stored.values():
            _plan_stored(plan, target, folder, choice, weight)
        _note_high(plan, folder)
    elif target.format != DEQUANTIZED:
        if config.get("model_type") in _TRANSPOSED:
            raise CheckpointError(
                f"{folder.path} is a {config['model_type']}, whose linear layers are Conv1D with "
                "transposed weights; FP8 checkpoints hold nn.Linear only. Quantize the loaded "
                'model with quaver.convert(model, recipe, weights="quantize") instead'
            )
        _plan_high(plan, target, folder, choice)
    folder.close()
    if not plan.actions:
        raise CheckpointError(
            f"{folder.path} has no weight that the format {target.format} would change; "
            "see include and exclude"
        )
    _plan_static(plan, target, static_scales)
    layers = [_layer(name) for name in _weights(folder)]
    plan.notes += [
        f"the pattern {glob!r} matches no layer"
        for glob in choice.own
        if not any(fnmatchcase(layer, glob) for layer in layers)
    ]
    return plan


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json gives the model; bfloat16 where it gives none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if dtype in _HIGH else torch.bfloat16


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


class _Choice(NamedTuple):
    """Globs on layers; of the defaults only where the source does not say what is linear."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    default: tuple[str, ...]

    @staticmethod
    def of(include: Iterable[str] | None, exclude: Iterable[str]) -> _Choice:
        given = tuple(exclude)
        own = tuple(glob for glob in given if glob not in DEFAULT_EXCLUDE)
        default = tuple(glob for glob in given if glob in DEFAULT_EXCLUDE)
        return _Choice(None if include is None else tuple(include), own, default)

    @property
    def own(self) -> tuple[str, ...]:
        """The globs that are not of the default."""
        return (*(self.include or ()), *self.exclude)

    def refusal(self, layer: str, excludes: tuple[str, ...]) -> str:
        """Why `layer` is not to be quantized; empty: it is."""
        for glob in excludes:
            if fnmatchcase(layer, glob):
                return f"excluded by {glob!r}"
        include = self.include
        if include is not None and not any(fnmatchcase(layer, glob) for glob in include):
            return "not among include"
        return ""


def _plan_stored(
    plan: Plan, target: Target, folder: Folder, choice: _Choice, weight: StoredWeight
) -> None:
    name = weight.name
    if target.format == DEQUANTIZED:
        plan.actions[name] = "dequantize"
        return
    refusal = choice.refusal(weight.layer, choice.exclude) or target.refusal(weight.shape)
    is_same = target.block(weight.shape[1]) == weight.block and target.holds(weight.scale)
    if refusal:
        plan.actions[name] = "dequantize"
        plan.left[name] = f"dequantized: {refusal}"
    elif is_same and folder.entries[name].dtype == E4M3:
        plan.actions[name] = "move"
    else:
        plan.actions[name] = "requantize"


def _note_high(plan: Plan, folder: Folder) -> None:
    """Of a checkpoint that is FP8 already, what is not stays as it is."""
    for name in _weights(folder):
        if name not in plan.stored:
            plan.left[name] = "not FP8 in the source"


def _weights(folder: Folder) -> list[str]:
    return [
        name
        for name, entry in folder.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2
    ]


def _plan_high(plan: Plan, target: Target, folder: Folder, choice: _Choice) -> None:
    for name in _weights(folder):
        entry = folder.entries[name]
        refusal = choice.refusal(_layer(name), (*choice.exclude, *choice.default))
        if entry.dtype not in _HIGH:
            plan.left[name] = f"it is {entry.dtype}"
        elif refusal := refusal or target.refusal(entry.shape):
            plan.left[name] = refusal
        else:
            plan.actions[name] = "quantize"


def _plan_static(plan: Plan, target: Target, given: Mapping[str, float] | None) -> None:
    brought = {w.layer: w.input_scale for w in plan.stored.values() if w.input_scale is not None}
    known: Mapping[str, float] = brought if given is None else given
    if not known:
        return
    layers = plan.layers()
    missing = [layer for layer in layers if layer not in known]
    if target.input_name is None:
        if given is not None:
            raise CheckpointError(f"the format {target.format} has no static input scales")
        plan.notes.append("the source's static input scales are dropped: the format has none")
    elif not missing:
        plan.static = {layer: known[layer] for layer in layers}
    elif given is None:
        plan.notes.append("the source's static input scales are dropped: not every layer has one")
    else:
        raise CheckpointError(
            f"every quantized layer needs an input scale, but {len(missing)} have none, such as "
            f"{missing[0]}: no text reached them, or the model calls them by other names; leave "
            "static scales away, or exclude the layers"
        )
