"""What the demo found, as values and as the JSON that ``--json`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import quaver as qv
from quaver.cli.demo.devices import peak_bytes
from quaver.cli.demo.layers import LayerError, quantized_layers
from quaver.cli.demo.metrics import Comparison
from quaver.cli.demo.options import unwritable
from quaver.conversion import ConversionReport


@dataclass(frozen=True)
class DeviceShare:
    """A device's part of the split model.

    ``layers`` counts the quantized layers whose weights are there, ``scales`` names the devices of
    those layers' states, ``peak_bytes`` is None for the CPU, which keeps no count.
    """

    device: str
    layers: int
    peak_bytes: int | None
    scales: list[str]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything that the tables show about one recipe, which is one of RECIPES by name.

    Whatever is called fp8 here is of that recipe, the FP4 one too.
    """

    recipe: str
    comparison: Comparison
    split_equals_unsplit: bool
    weight_bytes_full: int
    weight_bytes_fp8: int
    devices: list[DeviceShare]
    layers: list[LayerError]
    conversion: ConversionReport

    def figures(self) -> dict[str, Any]:
        """What tells one recipe from another; a figure that is not finite becomes None."""
        figures = {
            "perplexity_full": self.comparison.perplexity_full,
            "perplexity_fp8": self.comparison.perplexity_fp8,
            "perplexity_ratio": self.comparison.perplexity_ratio,
            "kl_mean": self.comparison.kl_mean,
            "top1_agreement": self.comparison.top1_agreement,
        }
        return {
            "recipe": self.recipe,
            **{key: _finite(value) for key, value in figures.items()},
            "split_equals_unsplit": self.split_equals_unsplit,
            "weight_bytes_full": self.weight_bytes_full,
            "weight_bytes_fp8": self.weight_bytes_fp8,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values: the figures, the devices and the layers."""
        return {
            **self.figures(),
            "devices": [asdict(share) for share in self.devices],
            "layers": [
                {**asdict(layer), "relative_error": _finite(layer.relative_error)}
                for layer in self.layers
            ],
        }


def write_json(results: Sequence[DemoResult], path: Path) -> None:
    """Write the first result whole, and the figures of all of them under "recipes".

    Raises CommandError when the file cannot be written.
    """
    content = {**results[0].to_json(), "recipes": [result.figures() for result in results]}
    try:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise unwritable(path, error) from None


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the model's parameters take, scales of quantized ones included, ties once."""
    seen = {
        (tensor.device, tensor.data_ptr()): tensor.numel() * tensor.element_size()
        for parameter in model.parameters()
        for tensor in _held(parameter)
        if tensor.numel()
    }
    return sum(seen.values())


def device_shares(model: nn.Module, devices: Sequence[torch.device]) -> list[DeviceShare]:
    """Each device's quantized layers, peak, and where the states of those layers are in fact."""
    counts = {str(device): 0 for device in devices}
    scales: dict[str, set[str]] = {name: set() for name in counts}
    for module in quantized_layers(model).values():
        home = str(qv.get_module_device(module))
        counts[home] += 1
        states = module.recipe_states.values()
        scales[home] |= {str(state.device) for state in states}
    return [
        DeviceShare(name, counts[name], peak_bytes(torch.device(name)), sorted(scales[name]))
        for name in counts
    ]


def _held(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a parameter is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    return [leaf for name in names for leaf in _held(getattr(tensor, name))]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
