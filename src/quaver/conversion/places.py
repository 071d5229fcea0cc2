"""Where a model holds its modules and parameters, shared ones included."""

from dataclasses import dataclass

from torch import nn

from quaver.nn.weights import QuantizedWeights


@dataclass(frozen=True)
class Place:
    """One place of a module: its qualified name, its parent, and the parent's name for it."""

    name: str
    parent: nn.Module | None
    child: str


@dataclass(frozen=True)
class ParameterUser:
    """A module that holds a parameter, under which name."""

    module: nn.Module
    parameter: str
    name: str


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `module` multiplies with, by name, one for each product."""
    names = module.weight_names if isinstance(module, QuantizedWeights) else ("weight",)
    found = ((name, module._parameters.get(name)) for name in names)
    return {name: weight for name, weight in found if weight is not None}


def places_of(model: nn.Module) -> dict[nn.Module, list[Place]]:
    """Every module of `model` in order, with all its places; a shared module has several."""
    by_name = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Module, list[Place]] = {}
    for name, module in by_name.items():
        above, _, child = name.rpartition(".")
        place = Place(name, by_name[above] if name else None, child)
        places.setdefault(module, []).append(place)
    return places


def users_of_parameters(model: nn.Module) -> dict[int, list[ParameterUser]]:
    """By id of each parameter, the modules of `model` that hold it; tied ones have several."""
    users: dict[int, list[ParameterUser]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                users.setdefault(id(parameter), []).append(ParameterUser(module, key, name))
    return users
