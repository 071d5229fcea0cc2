"""y = x W^T + b on quantized operands, forward and backward: three casts, three matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch

from quaver.devices import autocast_dtype
from quaver.functional.gemm import (
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
from quaver.tensors import QuantizedTensor


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which x is computed with: that of `torch.autocast` if on, else x's own."""
    return autocast_dtype(x.device.type) or x.dtype


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: LinearPlan
) -> torch.Tensor:
    """y = x W^T + b.

    Args:
        x: [..., K], float32, bfloat16 or float16; or quantized, and then not quantized again.
        weight: [N, K], of its own dtype, or quantized.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype that `activation_dtype(x)` names. Gradients come back in the dtypes of
        x, weight and bias.
    """
    expect_casts(weight, plan, x)
    dtype = activation_dtype(x)
    given = isinstance(x, QuantizedTensor)
    if given:  # what is saved of it is the input as it came
        plan = plan._replace(keeps_input=False)
    rows = x if given or x.dtype == dtype else x.to(dtype)
    if x.dim() != 2:
        rows = rows.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        draw = plan.draw()
        y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, plan, dtype, draw
        )
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
        dtype: torch.dtype,
        draw: torch.Tensor | None,
    ) -> torch.Tensor:
        needs = Needs(*ctx.needs_input_grad[:3])
        x_columns, w_columns = columns_needed(plan, needs)
        x = quantize_input(rows, plan, x_columns)
        w = quantize_weight(weight, plan, w_columns)
        y = product(x.rowwise, w.rowwise, bias, dtype)
        tensors, layouts = operands_to_save(x, w, (rows, weight), plan, needs)
        ctx.save_for_backward(*tensors)
        ctx.draw = draw
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
    needs = Needs(*ctx.needs_input_grad[:3])
    found = gradients(grad, ctx.saved_tensors, ctx.saved, ctx.plan, needs, ctx.draw)
    return (*found, None, None, None)
