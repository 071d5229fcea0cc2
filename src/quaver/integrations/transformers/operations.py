"""What transformers' loader does with a weight between the file and the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.accelerate import load_offloaded_parameter

from quaver.checkpoint.flat import flatten_state
from quaver.errors import CheckpointError
from quaver.tensors import QuantizedTensor

_PARTS = {
    "weight": "rowwise_data",
    "weight_scale_inv": "rowwise_scale_inv",
    "weight_global_scale_inv": "rowwise_global_scale_inv",
}
SERIALIZED = {"weight": list(_PARTS)}
"""A quantized weight in a file, as `quaver.checkpoint` names its parts: the row-wise ones."""


def single(values: Any) -> torch.Tensor:
    """The tensor of an entry, which the loader gives alone or in a list."""
    tensor: torch.Tensor = values[0] if isinstance(values, list) else values
    return tensor


class _Operation(ConversionOps):  # type: ignore[misc]
    """What the two share: the quantizer, and with it the layers."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Operation:
        """Itself: the loader copies an operation for each weight, which would copy all layers."""
        return self


class QuantizeWeight(_Operation):
    """Quantizes a weight that was just read, on the device where it goes."""

    def convert(
        self, input_dict: dict[str, Any], *, model: Any = None, **context: Any
    ) -> dict[str, Any]:
        """The entries, those of layers that get quantized weights as such weights.

        Raises:
            CheckpointError: a weight has another shape than its layer.
        """
        layers = self.hf_quantizer.quantized_layers
        entries: dict[str, Any] = {}
        for name, values in input_dict.items():
            layer = layers.get(name.removesuffix(".weight"))
            entries[name] = single(values) if layer is None else _quantized(name, layer, values)
        return entries


def _quantized(name: str, layer: Any, values: Any) -> nn.Parameter:
    value = single(values)
    if value.shape != layer.weight.shape:
        raise CheckpointError(
            f"{name} must have shape {tuple(layer.weight.shape)}, but the checkpoint's has "
            f"{tuple(value.shape)}"
        )
    layer._parameters["weight"] = nn.Parameter(value, requires_grad=False)
    if not layer.recipe_states:
        layer.set_weight_scale()
    layer.quantize_weight()
    weight: nn.Parameter = layer._parameters["weight"]
    return weight


class RestoreWeight(_Operation):
    """Puts a quantized weight together from its parts; other weights pass through it."""

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str = "",
        model: Any = None,
        **context: Any,
    ) -> dict[str, Any]:
        """The weight, on the device where its parts are.

        Raises:
            CheckpointError: a part is missing, or is not what the layer's recipe makes.
        """
        layer_name = full_layer_name.removesuffix(".weight")
        layer = self.hf_quantizer.quantized_layers.get(layer_name)
        if layer is None:
            return {full_layer_name: _plain(full_layer_name, input_dict, model)}
        parts = {_PARTS[name]: single(each) for name, each in input_dict.items()}
        like: QuantizedTensor = layer.weight
        expected = like.parts()
        if parts.keys() != expected.keys():
            raise CheckpointError(
                f"{full_layer_name} must have the parts {', '.join(expected)} in the checkpoint, "
                f"but it has {', '.join(parts)}"
            )
        for name, part in parts.items():
            _check_part(f"{full_layer_name}'s {name}", part, expected[name])
        weight = like.like({name: parts[name] for name in expected})
        if like.quantizer is not None:
            weight.quantizer = like.quantizer.to(weight.device)
        self.hf_quantizer.restored.add(layer_name)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


def _plain(name: str, input_dict: dict[str, Any], model: Any) -> torch.Tensor:
    """A weight that is not quantized, in the dtype that the model has for it."""
    if list(input_dict) != ["weight"]:
        raise CheckpointError(
            f"{name} is quantized in the checkpoint, but not by the quantization config beside it"
        )
    return single(input_dict["weight"]).to(model.get_parameter_or_buffer(name).dtype)


def _check_part(name: str, part: torch.Tensor, expected: torch.Tensor) -> None:
    if part.shape != expected.shape or part.dtype != expected.dtype:
        raise CheckpointError(
            f"{name} must be {expected.dtype} {tuple(expected.shape)}, but the checkpoint's is "
            f"{part.dtype} {tuple(part.shape)}"
        )
    if name.endswith("scale_inv"):
        scales = part.float()
        if not (scales.isfinite() & (scales >= 0)).all():
            raise CheckpointError(f"{name} must hold finite scales of at least 0")


def saved_parts(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state of `model` as plain tensors with metadata, which `quaver.checkpoint` reads, too.

    Offloaded weights that are quantized are taken from where they are.
    """
    plain: dict[str, torch.Tensor] = {}
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, QuantizedTensor):
            plain[name] = tensor
        elif tensor.device.type == "meta":
            quantized[name] = load_offloaded_parameter(model, name)
        else:
            quantized[name] = tensor
    flat, metadata = flatten_state(quantized)
    return plain | flat, metadata
