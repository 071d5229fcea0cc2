"""y = x W^T + b on quantized operands, forward and backward: three casts, three matrix products.

Plain tensors go in and plain tensors are saved; backward reads nothing ambient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quaver.devices import autocast_dtype
from quaver.errors import RecipeError
from quaver.kernels import operand_values, scaled_mm
from quaver.kernels.scaled_mm.layouts import BLOCK_2D, PLAIN
from quaver.recipe import BackwardOverride
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.state import RecipeState, Request, Scales
from quaver.scaling.used import Used
from quaver.tensors import Operand, Quantized, QuantizedTensor


class LinearPlan(NamedTuple):
    """How one linear is quantized.

    Attributes:
        forward: the state with the slots input 0, weight 1.
        backward: the state with the slot grad_output 0.
        record: whether the forward's amaxes are recorded.
        again: in a recomputation, the scales of the first run.
        passes: where the backward notes that it recorded amaxes.
        outer: in a recomputation, the backward pass around it.
        weight: the weight's operands if they are kept from an earlier forward.
        override: what the backward computes with instead of quantized operands.
    """

    forward: RecipeState
    backward: RecipeState
    record: bool
    again: Scales | None
    passes: BackwardPasses
    outer: Used | None
    weight: Quantized | None = None
    override: BackwardOverride = None


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which x is computed with: that of `torch.autocast` if on, else x's own."""
    return autocast_dtype(x.device.type) or x.dtype


def quantize_weight(weight: torch.Tensor, plan: LinearPlan, columnwise: bool) -> Quantized:
    """The weight's operands: what the plan brings, a quantized parameter's own, or a fresh cast."""
    if plan.weight is not None:
        return plan.weight
    if isinstance(weight, QuantizedTensor):
        return weight.quantized(columnwise=columnwise)
    return plan.forward.operands(weight, 1, Request(True, columnwise, plan.record, plan.again))


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
    plan.forward.expect(0)
    if plan.weight is None and not isinstance(weight, QuantizedTensor):
        plan.forward.expect(1)
    dtype = activation_dtype(x)
    rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        plan.backward.expect(0)
        draw = plan.backward.draw()
        y: torch.Tensor = _Linear.apply(rows, weight, bias, plan, draw)  # type: ignore[no-untyped-call]
    else:
        y, _, _ = _forward(rows, weight, bias, plan, (False, False))
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _forward(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: LinearPlan,
    columnwise: tuple[bool, bool],
) -> tuple[torch.Tensor, Quantized, Quantized]:
    """The output, and the operands of x and the weight; `columnwise`: which of theirs to make."""
    x = plan.forward.operands(rows, 0, Request(True, columnwise[0], plan.record, plan.again))
    w = quantize_weight(weight, plan, columnwise[1])
    return _product(x.rowwise, w.rowwise, bias, rows.dtype), x, w


def _product(
    a: Operand | None, b: Operand | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """A @ B^T + bias."""
    if a is None or b is None:
        raise ValueError("a product needs both operands")
    if a.layout == b.layout == BLOCK_2D:
        raise RecipeError(
            "of two operands of a product at most one may have blocks of 128×128; give one of them "
            "block_scaling_dim=1"
        )
    y: torch.Tensor = scaled_mm(
        a.data,
        a.scale_inv,
        b.data,
        b.scale_inv,
        bias,
        dtype,
        a.layout,
        b.layout,
        a.global_scale_inv,
        b.global_scale_inv,
    )
    return y


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
        needs_x, needs_w, *_ = ctx.needs_input_grad
        quantizes = plan.override is None
        y, x, w = _forward(rows, weight, bias, plan, (quantizes and needs_w, quantizes and needs_x))
        if plan.override == "high_precision":
            saved_x: Operand | None = _plain_columns(rows)
            saved_w: Operand | None = _plain_columns(weight)
        elif plan.override == "dequantized":  # row-wise: what the forward computed with
            saved_x, saved_w = x.rowwise, w.rowwise
        else:
            saved_x, saved_w = x.columnwise, w.columnwise
        x_tensors, x_layout = _flatten(saved_x if needs_w else None)
        w_tensors, w_layout = _flatten(saved_w if needs_x else None)
        ctx.save_for_backward(*x_tensors, *w_tensors, draw)
        ctx.layouts = (x_layout, w_layout)
        ctx.plan = plan
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return _without_derivative(_backward(ctx, grad))
        return _backward(ctx, grad)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    plan: LinearPlan = ctx.plan
    x = _unflatten(saved[:3], ctx.layouts[0], plan.override)
    w = _unflatten(saved[3:6], ctx.layouts[1], plan.override)
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    if plan.override is None:
        request = Request(needs_x, needs_w, record=True, draw=saved[6])
        g = plan.backward.operands(grad, 0, request)
        if isinstance(plan.backward, DelayedScalingState) and not torch.compiler.is_compiling():
            plan.passes.note(plan.backward, plan.outer)
    else:
        g = Quantized(Operand(grad, None, PLAIN), _plain_columns(grad))
    dx = _product(g.rowwise, w, None, x_dtype) if needs_x else None
    dw = _product(g.columnwise, x, None, w_dtype) if needs_w else None
    db = grad.sum(0, dtype=torch.float32).to(bias_dtype) if needs_bias else None
    return dx, dw, db, None, None


def _without_derivative(
    gradients: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """`gradients`, which raise when they are differentiated: casts have no derivative."""
    message = (
        b"a quantized linear has no second derivative; compute what is differentiated twice inside "
        b"autocast(enabled=False)"
    )
    known = [g.detach().requires_grad_() for g in gradients if g is not None]
    with torch.enable_grad():
        marked = torch._C._functions.DelayedError(message, len(known))(*known)
    rest = iter(marked if isinstance(marked, tuple) else (marked,))
    return tuple(None if g is None else next(rest) for g in gradients)


def _plain_columns(x: torch.Tensor) -> Operand:
    value = x.dequantize() if isinstance(x, QuantizedTensor) else x
    return Operand(value.t(), None, PLAIN)


def _flatten(operand: Operand | None) -> tuple[tuple[torch.Tensor | None, ...], str]:
    """An operand as three tensors to save and its layout."""
    if operand is None:
        return (None, None, None), PLAIN
    return (operand.data, operand.scale_inv, operand.global_scale_inv), operand.layout


def _unflatten(
    saved: tuple[torch.Tensor, ...], layout: str, override: BackwardOverride
) -> Operand | None:
    """The operand, [K, M], that the backward multiplies with; None: none was saved."""
    data, scale_inv, global_scale_inv = saved
    if data is None:
        return None
    if override == "dequantized":
        value = operand_values(data, scale_inv, layout, global_scale_inv)
        return Operand(value.t(), None, PLAIN)
    return Operand(data, scale_inv, layout, global_scale_inv)
