"""Which norms of a model can be fused with what they feed, and why the others cannot."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from quaver.conversion.fusion.functions import activation_of, looks_like_norm, norm_of
from quaver.conversion.fusion.modules import Absorbed, Columns, LayerNormMLPDropout, PassThrough
from quaver.conversion.fusion.obstacles import Obstacles
from quaver.conversion.fusion.source import UnrecognizedError, consumer_of, formula, readers_of
from quaver.conversion.fusion.swap import FusionPlan, Member, Source
from quaver.conversion.plan import Plan
from quaver.conversion.report import UnfusedNorm, class_name
from quaver.conversion.swap import has_twin, is_transposed
from quaver.nn import LayerNormLinear, LayerNormMLP
from quaver.nn.weights import QuantizedWeights


def plan_fusions(model: nn.Module, plan: Plan) -> None:
    """Put the fusions of `model` into `plan`, and take the layers that go into them out of it.

    A norm is looked at if a module beside it has linear layers. One that cannot be fused is noted,
    with the reason.
    """
    obstacles = Obstacles(model, plan)
    for block in obstacles.places:
        if not any(has_twin(inner) for outer in block.children() for inner in outer.children()):
            continue
        for child, norm in block.named_children():
            if not looks_like_norm(norm) or isinstance(norm, QuantizedWeights):
                continue
            try:
                plan.fusions.append(_fusion(block, child, norm, obstacles))
            except UnrecognizedError as reason:
                place = obstacles.name(norm)
                plan.unfused.append(UnfusedNorm(place, class_name(type(block)), str(reason)))
    if not plan.fusions and not plan.unfused:
        plan.notes.append(
            "Nothing was fused: no module holds a norm beside a module with linear layers."
        )
    fused = {member.module for fusion in plan.fusions for member in fusion.members}
    plan.layers = [layer for layer in plan.layers if layer.module not in fused]


def _fusion(block: nn.Module, child: str, norm: nn.Module, obstacles: Obstacles) -> FusionPlan:
    use = consumer_of(block, child)
    consumer = _child(block, use.child)
    obstacles.check_forward(block)
    obstacles.check_norm(norm)
    why_no_mlp = None
    if use.alone and use.argument == 0:
        mlp = _mlp_of(consumer)
        if mlp is not None:
            try:
                return _whole_mlp(norm, consumer, mlp, obstacles)
            except UnrecognizedError as reason:
                why_no_mlp = reason
    try:
        obstacles.check_input(consumer)
        plan = _projections(norm, consumer, readers_of(consumer, use.argument), obstacles)
    except UnrecognizedError as reason:
        raise why_no_mlp or reason from reason
    return plan if why_no_mlp is None else plan._replace(note=f"not the whole MLP: {why_no_mlp}")


# ---- a norm and the projections after it


def _projections(
    norm: nn.Module, consumer: nn.Module, readers: list[str], obstacles: Obstacles
) -> FusionPlan:
    if not readers:
        raise UnrecognizedError(f"{type(consumer).__name__}.forward calls no child with its output")
    linears = [_child(consumer, reader) for reader in readers]
    layer = obstacles.check_linears(linears)
    sources = {
        **_norm_sources(norm),
        "weight": [Source(each, "weight", is_transposed(each)) for each in linears],
        **_bias_sources("bias", linears),
    }
    obstacles.check_parameters(sources.values())
    heights = [_shape(each)[0] for each in linears]
    width = sum(heights)
    twin = LayerNormLinear(
        _shape(linears[0])[1],
        width,
        bias="bias" in sources,
        **norm_of(norm)._asdict(),
        device="meta",
    )
    members, first = [], 0
    for linear, height in zip(linears, heights, strict=True):
        attributes = {"columns": (first, first + height), "width": width}
        members.append(Member(linear, Columns, attributes))
        first += height
    return FusionPlan(
        name=obstacles.name(norm),
        host=norm,
        twin=twin,
        sources=sources,
        members=members,
        replaces=tuple(map(obstacles.name, (norm, *linears))),
        recipe=layer.recipe,
        quantize=layer.quantize,
    )


# ---- a norm and the MLP after it


class _Mlp(NamedTuple):
    """The children of an MLP, by name: `first` are the gate's and the other layer, or one."""

    first: tuple[str, ...]
    activation: str
    last: str
    dropouts: tuple[str, ...]


def _mlp_of(module: nn.Module) -> _Mlp | None:
    """The parts of `module` if it computes what an MLP does."""
    try:
        term: Any = formula(module)
    except UnrecognizedError:
        return None
    dropouts: list[str] = []
    while isinstance(term, tuple) and isinstance(getattr(module, term[0], None), nn.Dropout):
        dropouts.insert(0, term[0])
        term = term[1]
    match term:
        case (last, (activation, (first, "x"))):
            return _Mlp((first,), activation, last, tuple(dropouts))
        case (last, ("*", (activation, (gate, "x")), (other, "x"))):
            return _Mlp((gate, other), activation, last, tuple(dropouts))
        case (last, ("*", (other, "x"), (activation, (gate, "x")))):
            return _Mlp((gate, other), activation, last, tuple(dropouts))
    return None


def _whole_mlp(norm: nn.Module, mlp: nn.Module, parts: _Mlp, obstacles: Obstacles) -> FusionPlan:
    obstacles.check_replaced(mlp)
    if mlp._parameters:
        raise UnrecognizedError(f"{obstacles.name(mlp)} has parameters of its own")
    first = [_child(mlp, name) for name in parts.first]
    last = _child(mlp, parts.last)
    linears = [*first, last]
    if len(set(linears)) < len(linears):
        raise UnrecognizedError(f"{obstacles.name(mlp)} calls a layer twice")
    layer = obstacles.check_linears(linears)
    sources = {
        **_norm_sources(norm),
        "fc1_weight": [Source(each, "weight", is_transposed(each)) for each in first],
        **_bias_sources("fc1_bias", first),
        "fc2_weight": [Source(last, "weight", is_transposed(last))],
        **_bias_sources("fc2_bias", [last]),
    }
    obstacles.check_parameters(sources.values())
    called = getattr(mlp, parts.activation, None)
    if isinstance(called, nn.Module):
        obstacles.check_unwatched(called)
    cls = LayerNormMLPDropout if parts.dropouts else LayerNormMLP
    twin = cls(
        _shape(last)[0],
        _shape(last)[1],
        activation=activation_of(called, len(first) == 2),
        **norm_of(norm)._asdict(),
        device="meta",
    )
    if isinstance(twin, LayerNormMLPDropout):
        twin.dropouts = parts.dropouts
    return FusionPlan(
        name=obstacles.name(mlp),
        host=mlp,
        twin=twin,
        sources=sources,
        members=[Member(norm, PassThrough, {}), *(Member(each, Absorbed, {}) for each in linears)],
        replaces=tuple(map(obstacles.name, (norm, *linears))),
        recipe=layer.recipe,
        quantize=layer.quantize,
    )


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules.get(name)
    if child is None:
        raise UnrecognizedError(f"{type(module).__name__}.{name}, which is called, is no module")
    return child


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(out_features, in_features)."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def _norm_sources(norm: nn.Module) -> dict[str, list[Source]]:
    names = [name for name, value in norm._parameters.items() if value is not None]
    return {f"layer_norm_{name}": [Source(norm, name)] for name in names}


def _bias_sources(name: str, linears: list[nn.Module]) -> dict[str, list[Source]]:
    found = [Source(each, "bias") for each in linears if each._parameters["bias"] is not None]
    if found and len(found) < len(linears):
        raise UnrecognizedError("some of the layers to be joined have a bias, and some have none")
    return {name: found} if found else {}
