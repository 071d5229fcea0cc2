"""The error of each quantized layer by itself, on the inputs that it gets in full precision.

The full-precision outputs of the layers are recorded for a short text. Then each quantized layer's
output is compared with its recorded one and replaced by it, so that every layer is given exactly
the input of full precision: a layer's error is its own, and one wrong layer shows as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import quaver as qv
from quaver.cli.demo.evaluate import logits
from quaver.cli.demo.metrics import relative_error
from quaver.nn.base import QuantizedModule

Recorded = dict[str, list[torch.Tensor]]
"""By the layer's name, its outputs on the CPU, one a call."""


@dataclass(frozen=True)
class LayerError:
    """A layer's relative error; None when the text never reached the layer."""

    name: str
    device: str
    relative_error: float | None


def quantized_layers(model: nn.Module) -> dict[str, QuantizedModule]:
    """The model's quantized layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedModule)}


def record_outputs(model: nn.Module, ids: torch.Tensor, device: torch.device) -> Recorded:
    """The outputs of every module with a weight matrix, in one pass over ids of shape (1, n)."""
    recorded: Recorded = defaultdict(list)

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                recorded[name].append(output.detach().cpu())

        return hook

    matrices = {n: m for n, m in model.named_modules() if _has_matrix(m)}
    with _hooks(m.register_forward_hook(hook_for(n)) for n, m in matrices.items()):
        logits(model, ids, device)
    return dict(recorded)


def layer_errors(
    model: nn.Module, recorded: Recorded, ids: torch.Tensor, device: torch.device
) -> list[LayerError]:
    """Each layer's error against what ``record_outputs`` gave for these ids, worst first."""
    layers = quantized_layers(model)
    calls: dict[str, list[float]] = defaultdict(list)

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
            wanted = recorded[name][len(calls[name])]
            calls[name].append(relative_error(output.detach().cpu(), wanted))
            return wanted.to(output.device, output.dtype)

        return hook

    with _hooks(m.register_forward_hook(hook_for(n)) for n, m in layers.items()):
        logits(model, ids, device)
    errors = [
        LayerError(name, str(qv.get_module_device(module)), max(calls[name], default=None))
        for name, module in layers.items()
    ]
    return sorted(errors, key=_badness, reverse=True)


def _badness(error: LayerError) -> float:
    value = error.relative_error
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def _has_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


@contextmanager
def _hooks(handles: Iterator[RemovableHandle]) -> Iterator[None]:
    installed = list(handles)
    try:
        yield
    finally:
        for handle in installed:
            handle.remove()
