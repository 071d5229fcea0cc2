"""A quantized tensor read in high precision, as autograd sees it."""

from __future__ import annotations

from typing import Any

import torch

from quaver.tensors import QuantizedTensor


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor) -> torch.Tensor:
        return tensor.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in high precision; a gradient passes through to it unchanged."""
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    plain: torch.Tensor = _Dequantize.apply(tensor)  # type: ignore[no-untyped-call]
    return plain
