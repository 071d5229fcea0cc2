"""Pickles of quantized tensors, which `torch.load(weights_only=True)` reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.tensors.frame import Frame

Saved = dict[str, tuple[torch.Tensor, torch.dtype]]
"""By name, a part's memory and its dtype."""


def reduced(tensor: Any) -> tuple[Any, ...]:
    """What `__reduce_ex__` returns: a quantizer belongs to a module, and goes to no file."""
    frame = tensor.frame()._replace(quantizer=None, is_view=False)
    saved: Saved = {
        # as bytes: pickle itself does not know the storages of FP8
        name: (part.view(torch.uint8) if part.element_size() == 1 else part, part.dtype)
        for name, part in tensor.parts().items()
    }
    is_parameter = isinstance(tensor, nn.Parameter)
    return restore, (type(tensor), saved, tuple(frame), tensor.requires_grad, is_parameter)


def restore(
    kind: Any, saved: Saved, frame: tuple[Any, ...], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """A quantized tensor from what pickling wrote."""
    parts = {name: part.view(dtype) for name, (part, dtype) in saved.items()}
    tensor: torch.Tensor = kind.build(parts, Frame(*frame))
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
