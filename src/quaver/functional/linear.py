"""y = x W^T + b in FP8, forward and backward: three casts and three matrix products.

Plain tensors go in and plain tensors are saved; backward reads nothing ambient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quaver.devices import autocast_dtype
from quaver.kernels import scaled_mm
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.state import RecipeState, Scales
from quaver.scaling.used import Used
from quaver.tensors import Float8Tensor, Payload


class LinearPlan(NamedTuple):
    """How one linear is quantized.

    Attributes:
        forward: the state with the slots input 0, weight 1.
        backward: the state with the slot grad_output 0.
        record: whether the forward's amaxes are recorded.
        again: in a recomputation, the scales of the first run.
        passes: where the backward notes that it recorded amaxes.
        outer: in a recomputation, the backward pass around it.
        weight: the weight's payload if it is quantized already.
    """

    forward: RecipeState
    backward: RecipeState
    record: bool
    again: Scales | None
    passes: BackwardPasses
    outer: Used | None
    weight: Payload | None


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which x is computed with: that of `torch.autocast` if on, else x's own."""
    return autocast_dtype(x.device.type) or x.dtype


def quantized_weight(weight: torch.Tensor, plan: LinearPlan) -> Payload:
    """The weight's payload: what the plan brings, a quantized parameter's own, or a fresh cast."""
    if plan.weight is not None:
        return plan.weight
    if isinstance(weight, Float8Tensor):
        return weight.payload()
    return plan.forward.quantize(weight, 1, record=plan.record, again=plan.again)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: LinearPlan
) -> torch.Tensor:
    """y = x W^T + b.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K], of its own dtype, or a Float8Tensor.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype that `activation_dtype(x)` names. Gradients come back in the dtypes of
        x, weight and bias.
    """
    plan.forward.expect(0)
    if plan.weight is None and not isinstance(weight, Float8Tensor):
        plan.forward.expect(1)
    dtype = activation_dtype(x)
    rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        plan.backward.expect(0)
        y: torch.Tensor = _Linear.apply(rows, weight, bias, plan)  # type: ignore[no-untyped-call]
    else:
        y, _, _ = _forward(rows, weight, bias, plan)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _forward(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: LinearPlan
) -> tuple[torch.Tensor, Payload, Payload]:
    x = plan.forward.quantize(rows, 0, record=plan.record, again=plan.again)
    w = quantized_weight(weight, plan)
    return scaled_mm(x.data, x.scale_inv, w.data, w.scale_inv, bias, rows.dtype), x, w


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: LinearPlan,
    ) -> torch.Tensor:
        y, x, w = _forward(rows, weight, bias, plan)
        nothing = (None, None)
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(*(x if needs_w else nothing), *(w if needs_x else nothing))
        ctx.plan = plan
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        plan: LinearPlan = ctx.plan
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
        g = plan.backward.quantize(grad, 0, record=True)
        if not torch.compiler.is_compiling():
            plan.passes.note(plan.backward, plan.outer)
        dx = dw = db = None
        if needs_x:
            dx = scaled_mm(g.data, g.scale_inv, w_data.t(), w_scale, None, x_dtype)
        if needs_w:
            dw = scaled_mm(g.data.t(), g.scale_inv, x_data.t(), x_scale, None, w_dtype)
        if needs_bias:
            db = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None
