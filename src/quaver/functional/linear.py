"""y = x W^T + b on quantized operands, forward and backward: three casts, three matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch

from quaver.devices import autocast_dtype
from quaver.functional.gemm import (
    SAVED_TENSORS,
    LinearPlan,
    Needs,
    Saved,
    columns_needed,
    expect_casts,
    gradients,
    operands_to_save,
    product,
    quantize_input,
    quantize_weight,
    without_derivative,
)


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which x is computed with: that of `torch.autocast` if on, else x's own."""
    return autocast_dtype(x.device.type) or x.dtype


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: LinearPlan
) -> torch.Tensor:
    """y = x W^T + b.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K], of its own dtype, or quantized.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype that `activation_dtype(x)` names. Gradients come back in the dtypes of
        x, weight and bias.
    """
    expect_casts(weight, plan)
    dtype = activation_dtype(x)
    rows = x if x.dtype == dtype else x.to(dtype)
    if x.dim() != 2:
        rows = rows.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        draw = plan.backward.draw()
        y: torch.Tensor = _Linear.apply(rows, weight, bias, plan, draw)  # type: ignore[no-untyped-call]
    else:
        quantized = quantize_input(rows, plan, False)
        y = product(quantized.rowwise, quantize_weight(weight, plan, False).rowwise, bias, dtype)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: LinearPlan,
        draw: torch.Tensor | None,
    ) -> torch.Tensor:
        needs = Needs(*ctx.needs_input_grad[:3])
        x_columns, w_columns = columns_needed(plan, needs)
        x = quantize_input(rows, plan, x_columns)
        w = quantize_weight(weight, plan, w_columns)
        y = product(x.rowwise, w.rowwise, bias, rows.dtype)
        tensors, layouts = operands_to_save(x, w, (rows, weight), plan, needs)
        ctx.save_for_backward(*tensors, draw)
        dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.saved = Saved(layouts, dtypes)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return without_derivative(_backward(ctx, grad))
        return _backward(ctx, grad)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, draw = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:3])
    found = gradients(grad, tuple(tensors[:SAVED_TENSORS]), ctx.saved, ctx.plan, needs, draw)
    return (*found, None, None)
