"""What runs where in a converted model, as values and as a readable table."""

from dataclasses import dataclass

import torch
from torch import nn

from quaver.conversion.errors import ConversionError
from quaver.conversion.report import (
    backend_legend,
    counted,
    recipe_labels,
    recipe_legend,
    short_backend,
)
from quaver.conversion.table import render
from quaver.devices import fp8_gemm_path
from quaver.nn import DotProductAttention
from quaver.nn.weights import QuantizedWeights
from quaver.recipe import Recipe
from quaver.scaling import DelayedScalingState, RecipeState
from quaver.tensors import QuantizedTensor

_INPUT_SLOT = 0


@dataclass(frozen=True)
class LayerStatus:
    """One of Quaver's layers as it is now.

    Args:
        name: qualified name.
        class_name: name of its class.
        device: where it computes; of an offloaded layer, where its weights are taken to for that.
        offloaded: whether its weights are on the meta device now.
        recipe: the attached recipe; None: it runs in FP8 inside `autocast` only.
        path: how its FP8 products are computed on `device`, natively or emulated, and why.
        scales_device: where its scales are; None while it has none.
        calibrated: whether a scale of its input is known, from calibration, training or a
            checkpoint; if not, each input's own amax is used.
        weight_dtype: of its (first) weight, the FP8 dtype if it is quantized.
        weight_bytes: of its parameters, scales included.
    """

    name: str
    class_name: str
    device: torch.device
    offloaded: bool
    recipe: Recipe | None
    path: str
    scales_device: torch.device | None
    calibrated: bool
    weight_dtype: torch.dtype
    weight_bytes: int


@dataclass(frozen=True)
class AttentionStatus:
    """One of Quaver's `DotProductAttention` modules as it is now.

    Args:
        name: qualified name.
        class_name: name of its class.
        recipe: the attached recipe, which quantizes inside of it; None: it does so inside an
            `autocast` whose recipe has fp8_dpa only.
        backend: what computes it where no `autocast` has another word, and why.
        scales_device: where its scales are; None while it has none.
        calibrated: whether the scales of its operands are known; if not, their own amaxes are used.
    """

    name: str
    class_name: str
    recipe: Recipe | None
    backend: str
    scales_device: torch.device | None
    calibrated: bool


@dataclass(frozen=True)
class ModelStatus:
    """All of Quaver's layers in a model; `str(status)` is a table.

    Args:
        layers: in the model's order.
        other_linears: how many nn.Linear layers the model has that are not Quaver's.
        weight_bytes: of all parameters of these layers, shared ones counted once.
        attention: the attention modules.
    """

    layers: tuple[LayerStatus, ...]
    other_linears: int
    weight_bytes: int
    attention: tuple[AttentionStatus, ...] = ()

    def __str__(self) -> str:
        layers = f"No layer is Quaver's ({self.other_linears} are nn.Linear)."
        if self.layers:
            layers = self._layer_table()
        return f"{layers}\n{self._attention_table()}" if self.attention else layers

    def _attention_table(self) -> str:
        recipes = recipe_labels(module.recipe for module in self.attention)
        rows = [
            (
                module.name,
                module.class_name,
                "high precision" if module.recipe is None else "FP8",
                recipes[module.recipe],
                "–" if module.scales_device is None else str(module.scales_device),
                "yes" if module.calibrated else "no",
                short_backend(module.backend),
            )
            for module in self.attention
        ]
        columns = ("attention", "class", "runs in", "recipe", "scales on", "calibrated", "backend")
        backends = backend_legend(module.backend for module in self.attention)
        return render("Attention", columns, rows) + recipe_legend(recipes) + backends

    def _layer_table(self) -> str:
        recipes = recipe_labels(layer.recipe for layer in self.layers)
        rows = [
            (
                layer.name,
                layer.class_name,
                f"{layer.device}, offloaded" if layer.offloaded else str(layer.device),
                recipes[layer.recipe],
                "–" if layer.scales_device is None else str(layer.scales_device),
                "yes" if layer.calibrated else "no",
                str(layer.weight_dtype).removeprefix("torch."),
                f"{layer.weight_bytes:,}",
            )
            for layer in self.layers
        ]
        columns = ("layer", "class", "device", "recipe", "scales on", "calibrated", "weight")
        table = render(f"{counted(rows)} of Quaver's", (*columns, "bytes each"), rows)
        paths = dict.fromkeys((layer.device, layer.path) for layer in self.layers)
        lines = [f"{device}: FP8 products {path}" for device, path in paths]
        lines.append(f"Weights of these layers: {self.weight_bytes:,} bytes.")
        lines.append(f"nn.Linear layers that are not Quaver's: {self.other_linears}.")
        return table + recipe_legend(recipes) + "\n" + "\n".join(lines)


def status(model: nn.Module) -> ModelStatus:
    """What each of Quaver's layers in `model` runs on, with which recipe and how, at this moment.

    Raises:
        ConversionError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"model must be an nn.Module, not {type(model).__name__}")
    layers, attention, others = [], [], 0
    parameters: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeights):
            layers.append(_layer_status(name, module))
            parameters.update((id(p), p) for p in module._parameters.values() if p is not None)
        elif isinstance(module, DotProductAttention):
            attention.append(_attention_status(name, module))
        elif isinstance(module, nn.Linear):
            others += 1
    total = sum(_bytes(parameter) for parameter in parameters.values())
    return ModelStatus(tuple(layers), others, total, tuple(attention))


def _layer_status(name: str, module: QuantizedWeights) -> LayerStatus:
    weight = getattr(module, module.weight_names[0])
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    forward = module.recipe_states.get("forward")
    device = _computes_on(module, weight)
    return LayerStatus(
        name=name,
        class_name=type(module).__name__,
        device=device,
        offloaded=weight.device.type == "meta",
        recipe=module.recipe,
        path=fp8_gemm_path(device),
        scales_device=None if forward is None else forward.device,
        calibrated=forward is not None and _is_calibrated(forward),
        weight_dtype=_payload_dtype(weight),
        weight_bytes=sum(_bytes(parameter) for parameter in own),
    )


def _attention_status(name: str, module: DotProductAttention) -> AttentionStatus:
    forward = module.recipe_states.get("forward")
    return AttentionStatus(
        name=name,
        class_name=type(module).__name__,
        recipe=module.recipe,
        backend=str(module.backend_for()),
        scales_device=None if forward is None else forward.device,
        calibrated=forward is not None and _is_calibrated(forward),
    )


def _computes_on(module: nn.Module, weight: torch.Tensor) -> torch.device:
    """The weight's device, or where accelerate takes an offloaded weight for each call."""
    if weight.device.type == "meta":
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            execution_device = getattr(each, "execution_device", None)
            if execution_device is not None:
                return torch.device(execution_device)
    return weight.device


def _is_calibrated(forward: RecipeState) -> bool:
    if not isinstance(forward, DelayedScalingState):
        return True  # there is nothing to calibrate
    if forward.device.type == "meta":
        return False
    inputs = slice(_INPUT_SLOT, None, len(forward.slot_names))  # of each product
    if forward.recipe.first_scale == "one":  # then a scale is "known" from the start
        seen = forward.amax_history[:, inputs].any() or (forward.scale[inputs] != 1).any()
        return bool(seen)
    return bool((forward.ready[inputs] > 0).any())


def _payload_dtype(weight: torch.Tensor) -> torch.dtype:
    if not isinstance(weight, QuantizedTensor):
        return weight.dtype
    dtype: torch.dtype = getattr(weight, "fp8_dtype", torch.float4_e2m1fn_x2)
    return dtype


def _bytes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, QuantizedTensor):
        return sum(_bytes(part) for part in tensor.parts().values())
    return tensor.numel() * tensor.element_size()
