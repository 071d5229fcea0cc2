"""Loaded tensors as a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import nn

from quaver.errors import CheckpointError
from quaver.nn.weights import QuantizedWeights
from quaver.tensors import QuantizedTensor


def check_fit(model: nn.Module, shapes: Mapping[str, torch.Size], quantized: Iterable[str]) -> None:
    """Raise unless a checkpoint fits `model`; scaling states may be missing.

    Args:
        shapes: of the checkpoint's tensors, by name.
        quantized: those of them that are quantized.

    Raises:
        CheckpointError: names are missing or too many, or a shape is another.
    """
    own = model.state_dict()
    states = {name for name in own if name.endswith("_extra_state")}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = _tied(parameters)
    missing = [
        name
        for name in own
        if name not in shapes and name not in states and not tied.get(name, set()) & set(shapes)
    ]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    unexpected = [name for name in shapes if name not in own]
    if unexpected:
        raise CheckpointError(
            f"the model has no place for {_some(unexpected)}; it must have the structure and the "
            "names of the one that was saved"
        )
    for name, shape in shapes.items():
        if name not in states and shape != own[name].shape:
            raise CheckpointError(
                f"{name} must be of shape {list(own[name].shape)} for this model, not {list(shape)}"
            )
    for name in quantized:
        if name not in parameters:
            raise CheckpointError(f"{name} is quantized in the checkpoint, and no parameter here")


def load_plain(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the parameters, buffers and states of `model`.

    A parameter on the meta device, which has no memory, is replaced by one on the tensor's device.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rest = {}
    for name, value in tensors.items():
        old = parameters.get(name)
        if old is not None and old.device.type == "meta":
            new = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
            _replace(model, old, new)
        else:
            rest[name] = value
    model.load_state_dict(rest, strict=False)


def put_parameter(model: nn.Module, name: str, value: QuantizedTensor) -> None:
    """Make `value` the parameter `name` of `model` wherever it is tied, on the parameter's device.

    It keeps the parameter's `requires_grad`, its nominal dtype, and its quantizer, if that made a
    tensor of the same form; a parameter on meta goes to the device of `value`.
    """
    old: torch.Tensor = model.get_parameter(name)
    device = value.device if old.device.type == "meta" else old.device
    moved = cast(QuantizedTensor, value.to(device=device, dtype=old.dtype))
    if isinstance(old, QuantizedTensor) and old.same_format(moved):
        moved.quantizer = old.quantizer
    parameter = nn.Parameter(moved, requires_grad=old.requires_grad)
    _replace(model, old, parameter)


def _replace(model: nn.Module, old: torch.Tensor, new: nn.Parameter) -> None:
    """Put `new` wherever `old` is."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new
                if isinstance(module, QuantizedWeights) and key in module.weight_names:
                    module._forget_weight(list(module.weight_names).index(key))


def _tied(parameters: Mapping[str, torch.Tensor]) -> dict[str, set[str]]:
    """By name, all names of the same parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), set()).add(name)
    return {name: names[id(parameter)] for name, parameter in parameters.items()}


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
