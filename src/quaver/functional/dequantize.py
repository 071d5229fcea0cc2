"""Between high precision and quantized tensors, as autograd sees it: gradients pass unchanged."""

from __future__ import annotations

from typing import Any

import torch

from quaver.devices import on_device
from quaver.quantizers import Quantizer
from quaver.tensors import Float8Tensor, Payload, QuantizedTensor


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor) -> torch.Tensor:
        return tensor.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        return quantizer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor
    ) -> torch.Tensor:
        made: torch.Tensor = Float8Tensor(data, scale_inv, dtype=values.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def handed_on(values: torch.Tensor, payload: Payload) -> torch.Tensor:
    """The Float8Tensor of a payload that stands for `values`, to which its gradient goes."""
    made: torch.Tensor = _HandOn.apply(values, *payload)  # type: ignore[no-untyped-call]
    return made


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in high precision; a gradient passes through to it unchanged."""
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    plain: torch.Tensor = _Dequantize.apply(tensor)  # type: ignore[no-untyped-call]
    return plain


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """x [..., K] as a quantized tensor; a gradient passes through to x unchanged.

    Linear layers take the result as it is. Several that share an input share its one cast then.

    Args:
        x: float32, bfloat16 or float16.
        quantizer: such as Float8CurrentScalingQuantizer(torch.float8_e4m3fn).
    """
    with on_device(x.device):
        made: QuantizedTensor = _Quantize.apply(x, quantizer)  # type: ignore[no-untyped-call]
    return made
