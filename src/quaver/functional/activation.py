"""Activations in float32 arithmetic on the input's device, gradients included."""

from __future__ import annotations

import math
from typing import Any

import torch

from quaver.kernels import activation as forward_kernel
from quaver.kernels import activation_backward, is_gated
from quaver.kernels.activation import reference
from quaver.kernels.activation.names import DEFAULT_ALPHA, DEFAULT_LIMIT


def activation(
    x: torch.Tensor, name: str, limit: float = DEFAULT_LIMIT, alpha: float = DEFAULT_ALPHA
) -> torch.Tensor:
    """f(x); of the gated ones f(a) * b, where x = [a, b] side by side.

    Args:
        x: [..., W], float32, bfloat16 or float16.
        name: gelu (its tanh form), qgelu, relu, srelu or silu; gated: geglu, glu, qgeglu, reglu,
            sreglu, swiglu or clamped_swiglu.
        limit, alpha: of clamped_swiglu.

    Returns:
        [..., W], gated [..., W / 2], in x's dtype.

    Raises:
        QuaverError: another name, or an odd W and a gated activation.
    """
    width = x.shape[-1] // (2 if is_gated(name) else 1)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        y: torch.Tensor = _Activation.apply(rows, name, limit, alpha)  # type: ignore[no-untyped-call]
    else:
        y = forward_kernel(rows, name, x.dtype, limit, alpha)
    return y.reshape(*x.shape[:-1], width)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, limit: float, alpha: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options = (name, limit, alpha)
        y: torch.Tensor = forward_kernel(x, name, x.dtype, limit, alpha)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        name, limit, alpha = ctx.options
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            y = reference.activation(x, name, x.dtype, limit, alpha)
            (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
        else:
            dx = activation_backward(grad, x, name, limit, alpha)
        return dx, None, None, None
