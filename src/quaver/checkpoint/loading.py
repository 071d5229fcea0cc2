"""`load_quantized`: an FP8 checkpoint of transformers' formats into a model of Quaver's layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quaver.checkpoint.files import Folder
from quaver.checkpoint.parameters import check_fit, load_plain, put_parameter
from quaver.checkpoint.states import check_states, is_state
from quaver.checkpoint.stored import StoredWeight, companions, stored_weights
from quaver.formats import MAX
from quaver.nn.conv1d import QuantizedConv1D
from quaver.nn.weights import QuantizedWeights, input_slot
from quaver.recipe import DEFAULT_RECIPE
from quaver.scaling import DelayedScalingState

_INPUT = input_slot(0)


@dataclass(frozen=True)
class LoadReport:
    """What `load_quantized` did.

    Attributes:
        quantized: weights that are quantized tensors now, with the class's name.
        dequantized: FP8 weights that are high-precision ones now, and why.
        static_inputs: layers whose input scale comes from the checkpoint.
        notes: what else a person should know.
    """

    quantized: tuple[tuple[str, str], ...]
    dequantized: tuple[tuple[str, str], ...]
    static_inputs: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.quantized)} weights are quantized tensors"]
        lines += [f"{name} is dequantized: {reason}" for name, reason in self.dequantized]
        if self.static_inputs:
            lines.append(f"{len(self.static_inputs)} layers have the checkpoint's input scale")
        return "\n".join([*lines, *self.notes])


def load_quantized(model: nn.Module, folder: str | Path) -> LoadReport:
    """Load the checkpoint in `folder` into `model`, FP8 weights as they are stored.

    The weights of Quaver's layers become Float8Tensor (a scale a tensor), Float8BlockwiseTensor
    (blocks of 128×128 or 1×128; a scale a row is held as equal scales of a row's blocks) or
    MXFP8Tensor, payloads and scales without loss. They go to the device where the parameter is, and
    keep its `requires_grad`; one on meta goes to the CPU. Where the layer is not Quaver's, or no
    class has such blocks, the weight is dequantized. Static input scales become the input's scale
    of layers with DelayedScaling.

    Args:
        model: with the names of the checkpoint, its layers converted by `quaver.convert`.
        folder: with safetensors files and config.json, as transformers writes it; or without
            quantization.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit `model`, which is unchanged.
    """
    files = Folder(Path(folder))
    stored = stored_weights(files)
    along = companions(files)
    plain = [name for name in files.entries if name not in along and name not in stored]
    shapes = {name: torch.Size(files.entries[name].shape) for name in (*stored, *plain)}
    check_fit(model, shapes, ())
    check_states(model, {name: files.read(name) for name in plain if is_state(name)})
    quantized: list[tuple[str, str]] = []
    dequantized: list[tuple[str, str]] = []
    for name, weight in stored.items():
        reason = _put(model, name, weight, files.read(name))
        if reason:
            dequantized.append((name, reason))
        else:
            quantized.append((name, type(model.get_parameter(name)).__name__))
    for name in plain:
        load_plain(model, {name: files.read(name)})
    static, notes = _set_inputs(model, stored)
    return LoadReport(tuple(quantized), tuple(dequantized), static, notes)


def _put(model: nn.Module, name: str, weight: StoredWeight, data: torch.Tensor) -> str:
    """Load one FP8 weight; returns why it was dequantized, if it was."""
    layer = model.get_submodule(weight.layer)
    dtype = getattr(layer, "weight").dtype  # noqa: B009 - a module's attribute is not known
    if not isinstance(layer, QuantizedWeights) or isinstance(layer, QuantizedConv1D):
        reason = f"a {type(layer).__name__} is not one of Quaver's layers with such a weight"
    else:
        tensor = weight.tensor(data, dtype)
        if tensor is not None:
            put_parameter(model, name, tensor)
            return ""
        height, width = weight.block or weight.shape
        reason = f"no tensor class has blocks of {height}×{width}"
    load_plain(model, {name: weight.dequantize(data, dtype)})
    return reason


def _set_inputs(
    model: nn.Module, stored: dict[str, StoredWeight]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give layers their static input scales; returns those that took them, and notes."""
    took, others = [], []
    for weight in stored.values():
        if weight.input_scale is None:
            continue
        layer = model.get_submodule(weight.layer)
        if isinstance(layer, QuantizedWeights) and _set_input(layer, weight.input_scale):
            took.append(weight.layer)
        else:
            others.append(weight.layer)
    note = (
        f"the static input scales of {len(others)} layers, such as {others[0]}, have no use: only "
        "layers with DelayedScaling keep scales"
        if others
        else ""
    )
    return tuple(took), (note,) if note else ()


def _set_input(layer: QuantizedWeights, scale_inv: float) -> bool:
    """Set the input's scale; False if the layer's recipe keeps none."""
    layer._refresh_states(layer.recipe or DEFAULT_RECIPE, layer.weight_matrix().device)
    state = layer.recipe_states["forward"]
    if not isinstance(state, DelayedScalingState):
        return False
    limit = MAX[state.dtype]
    with torch.no_grad():
        state.scale[_INPUT] = 1.0 / scale_inv
        state.ready[_INPUT] = 1.0
        state.amax_history[-1, _INPUT] = limit * scale_inv  # so that it outlives the next update
    state.unset[_INPUT] = False
    return True
