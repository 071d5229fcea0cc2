"""The fusion of some modules into one, in place, and its undoing: parameters move, modules stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from quaver.conversion.swap import RECORD, Conversion, set_class
from quaver.nn.weights import QuantizedWeights
from quaver.recipe import Recipe


class Source(NamedTuple):
    """A parameter that goes into one of a fused module.

    Attributes:
        transposed: stored [in_features, out_features].
    """

    module: nn.Module
    name: str
    transposed: bool = False


class Member(NamedTuple):
    """A module that gives its work away, the class that it gets, and attributes for that."""

    module: nn.Module
    cls: type[nn.Module]
    attributes: dict[str, Any]


class FusionPlan(NamedTuple):
    """A fusion that is going to be done.

    Attributes:
        name: the host's.
        host: the module that becomes the fused one.
        twin: what it becomes, with parameters on the meta device.
        sources: for each of the twin's parameters, by name, what is put under each other there.
        members: the other modules.
        replaces: names of all the modules whose work is done by the host.
        quantize: whether its weights become FP8.
        note: for the report.
    """

    name: str
    host: nn.Module
    twin: QuantizedWeights
    sources: dict[str, list[Source]]
    members: list[Member]
    replaces: tuple[str, ...]
    recipe: Recipe | None
    quantize: bool
    note: str = ""

    @property
    def converted(self) -> QuantizedWeights:
        """The host, once it is fused."""
        return cast(QuantizedWeights, self.host)


class Piece(NamedTuple):
    """A source as it is remembered.

    Attributes:
        size: its rows in the fused parameter.
        parameter: the original one, emptied; None if the fused module holds it as it was.
    """

    source: Source
    size: int
    parameter: nn.Parameter | None


@dataclass(frozen=True)
class Fusion(Conversion):
    """What a fusion did to its host and to the members.

    Args:
        replaced: the host's attributes before that the twin's replaced.
        added: the names of those that it did not have.
        members: each with its class before, and the names of the attributes that it got.
        pieces: by name of the fused parameter.
        twin: the host's class since.
    """

    replaced: tuple[tuple[str, Any], ...] = ()
    added: tuple[str, ...] = ()
    members: tuple[tuple[nn.Module, type[nn.Module], tuple[str, ...]], ...] = ()
    pieces: tuple[tuple[str, tuple[Piece, ...]], ...] = ()
    twin: type[nn.Module] = nn.Module

    @property
    def converted(self) -> type[nn.Module] | None:
        """The class of the fused module."""
        return self.twin


def fuse(plan: FusionPlan) -> QuantizedWeights:
    """Carry out `plan`, and attach its recipe.

    Parameters that go in alone and as they are stay the same objects; the others are put together
    into new ones, and are empty until `unfuse`.

    Raises:
        RuntimeError: no memory is left for these; nothing changed.
    """
    joined = {name: _join(sources) for name, sources in plan.sources.items()}
    host = plan.host
    own = {key: plan.twin.__dict__[key] for key in plan.twin.__dict__.keys() - _module_keys()}
    own["_parameters"] = {name: joined.get(name) for name in plan.twin._parameters}
    pieces = tuple(
        (name, tuple(_take(source, joined[name]) for source in sources))
        for name, sources in plan.sources.items()
    )
    members = []
    for member in plan.members:
        members.append((member.module, type(member.module), tuple(member.attributes)))
        set_class(member.module, member.cls)
        member.module.__dict__.update(member.attributes)
    record = Fusion(
        original=type(host),
        recipe=None,
        replaced=tuple((key, host.__dict__[key]) for key in own if key in host.__dict__),
        added=tuple(key for key in own if key not in host.__dict__),
        members=tuple(members),
        pieces=pieces,
        twin=type(plan.twin),
    )
    host.__dict__.update(own)
    set_class(host, type(plan.twin))
    fused = cast(QuantizedWeights, host)
    fused.recipe = plan.recipe
    fused.qualified_name = plan.name
    fused.__dict__[RECORD] = record
    return fused


def unfuse(host: QuantizedWeights) -> None:
    """Undo `fuse`; a quantized weight must have been dequantized before."""
    record: Fusion = host.__dict__.pop(RECORD)
    fused = {name: host._parameters[name] for name, _ in record.pieces}
    host._drop_quantized()
    for key in record.added:
        host.__dict__.pop(key, None)
    host.__dict__.update(record.replaced)
    for module, cls, attributes in record.members:
        for key in attributes:
            module.__dict__.pop(key, None)
        set_class(module, cls)
    set_class(host, cast(type[nn.Module], record.original))
    for name, pieces in record.pieces:
        _give_back(cast(nn.Parameter, fused[name]), pieces)


def _module_keys() -> frozenset[str]:
    return frozenset(nn.Module().__dict__)


def _join(sources: list[Source]) -> nn.Parameter:
    """The fused parameter, with its gradient; a source that is alone and as it is, itself."""
    parameters = [cast(nn.Parameter, each.module._parameters[each.name]) for each in sources]
    if len(sources) == 1 and not sources[0].transposed:
        return parameters[0]
    joined = nn.Parameter(
        _stacked(sources, [parameter.detach() for parameter in parameters]),
        requires_grad=parameters[0].requires_grad,
    )
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        joined.grad = _stacked(sources, gradients)
    return joined


def _stacked(sources: list[Source], tensors: list[torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        parts = [_turned(tensor, source) for tensor, source in zip(tensors, sources, strict=True)]
        return torch.cat(parts)


def _turned(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    return tensor.t() if source.transposed else tensor


def _take(source: Source, joined: nn.Parameter) -> Piece:
    """Take the parameter from its module, and its memory too if `joined` has a copy of it."""
    parameter = cast(nn.Parameter, source.module._parameters[source.name])
    source.module._parameters[source.name] = None
    size = int(_turned(parameter, source).shape[0])
    if parameter is joined:
        return Piece(source, size, None)
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    return Piece(source, size, parameter)


def _give_back(fused: nn.Parameter, pieces: tuple[Piece, ...]) -> None:
    source, _, parameter = pieces[0]
    if parameter is None:
        source.module._parameters[source.name] = fused
        return
    start = 0
    for source, size, parameter in pieces:
        rows = slice(start, start + size)
        start += size
        values = _part(fused.detach(), rows, source)
        original = cast(nn.Parameter, parameter)
        if torch._has_compatible_shallow_copy_type(original, values):
            original.data = values
        else:  # from one backend to another
            original = nn.Parameter(values)
        original.requires_grad_(fused.requires_grad)
        if fused.grad is not None:
            original.grad = _part(fused.grad, rows, source)
        source.module._parameters[source.name] = original


def _part(tensor: torch.Tensor, rows: slice, source: Source) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _turned(tensor[rows], source).clone(memory_format=torch.contiguous_format)
