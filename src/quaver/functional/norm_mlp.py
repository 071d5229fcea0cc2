"""y = f(norm(x) W1^T + b1) W2^T + b2 with quantized operands, forward and backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quaver.functional.gemm import (
    SAVED_TENSORS,
    LinearPlan,
    Needs,
    Saved,
    columns_needed,
    expect_casts,
    gradients,
    note_backward,
    operands_to_save,
    product,
    products,
    quantize_input,
    quantize_weight,
    without_derivative,
)
from quaver.functional.linear import activation_dtype
from quaver.functional.norm_linear import Norm, NormOptions, norm_gradients, quantize_normed
from quaver.kernels import (
    activation,
    activation_backward,
    activation_backward_cast,
    activation_cast,
)
from quaver.scaling.delayed import DelayedScalingState, as_operands
from quaver.tensors import Quantized

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Activation(NamedTuple):
    """An activation by name; limit and alpha are clamped_swiglu's."""

    name: str
    limit: float
    alpha: float


class Layer(NamedTuple):
    """A linear layer: weight [N, K], bias [N] or None, and how it is quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    plan: LinearPlan


def quantize_activated(
    hidden: torch.Tensor, function: Activation, plan: LinearPlan, columnwise: bool
) -> tuple[Quantized, torch.Tensor | None]:
    """f(hidden), quantized as the plan's input; and in hidden's dtype, where it is rounded first.

    DelayedScaling quantizes it from float32; the other recipes round it to hidden's dtype first.
    """
    name, limit, alpha = function
    state = plan.forward
    if not isinstance(state, DelayedScalingState):
        value = activation(hidden, name, hidden.dtype, limit, alpha)
        return quantize_input(value, plan, columnwise), value
    stored = columnwise and state.stores_transposed
    arguments = state.cast_arguments(plan.input_slot, plan.record, plan.again, stored)
    results = activation_cast(hidden, name, limit, alpha, *arguments)
    return as_operands(results, True, columnwise), None


def activated_gradients(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    function: Activation,
    saved: tuple[tuple[torch.Tensor, ...], Saved, LinearPlan, Needs],
    draw: torch.Tensor | None,
) -> Gradients:
    """The gradients of the layer before the activation: as `gradients`, of grad * f'(hidden).

    DelayedScaling quantizes that product from float32, unless the activation is gated; the other
    recipes, and gated activations, round it to hidden's dtype first.

    Args:
        grad: of f(hidden).
        saved: what `gradients` takes of the layer.
    """
    name, limit, alpha = function
    tensors, kept, plan, needs = saved
    state = plan.backward
    if not isinstance(state, DelayedScalingState):
        dhidden = activation_backward(grad, hidden, name, limit, alpha)
        return gradients(dhidden, tensors, kept, plan, needs, draw)
    stored = needs.weight and state.stores_transposed
    arguments = state.cast_arguments(plan.grad_slot, True, None, stored)
    *cast, sums = activation_backward_cast(grad, hidden, name, limit, alpha, *arguments)
    note_backward(plan)
    g = as_operands(cast, needs.x, needs.weight)
    return products(g, sums if needs.bias else None, tensors, kept, plan, needs)


def norm_mlp(
    x: torch.Tensor,
    given: Norm,
    first: Layer,
    second: Layer,
    function: Activation,
    with_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y = f(norm(x) W1^T + b1) W2^T + b2.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        first: weight [F, K], of a gated activation [2F, K] with the gate's rows first.
        second: weight [N, F].
        with_normed: return norm(x), too.

    Returns:
        [..., N] and, if asked for, norm(x) [..., K], in the dtype that `activation_dtype(x)` names.
        Gradients come back in the dtypes of the operands.
    """
    expect_casts(first.weight, first.plan)
    expect_casts(second.weight, second.plan)
    dtype = activation_dtype(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    value = None
    if torch.is_grad_enabled():
        call = _Call((first.plan, second.plan), given.options, function, dtype, with_normed)
        y = _NormMLP.apply(  # type: ignore[no-untyped-call]
            rows,
            given.weight,
            given.bias,
            first.weight,
            first.bias,
            second.weight,
            second.bias,
            call,
            first.plan.draw(),
            second.plan.draw(),  # further random bits for the other product
        )
        if with_normed:
            y, value = y
    else:
        operands, value, _, _ = quantize_normed(
            rows, given, dtype, first.plan, (False, with_normed)
        )
        w = quantize_weight(first.weight, first.plan, False)
        hidden = product(operands.rowwise, w.rowwise, first.bias, dtype)
        activated, _ = quantize_activated(hidden, function, second.plan, False)
        w = quantize_weight(second.weight, second.plan, False)
        y = product(activated.rowwise, w.rowwise, second.bias, dtype)
    y = y.reshape(*x.shape[:-1], second.weight.shape[0])
    return y, value.reshape(x.shape) if with_normed and value is not None else None


class _Call(NamedTuple):
    plans: tuple[LinearPlan, LinearPlan]
    options: NormOptions
    function: Activation
    dtype: torch.dtype
    with_normed: bool


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd wants its tensors flat
        ctx: Any,
        rows: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight1: torch.Tensor,
        bias1: torch.Tensor | None,
        weight2: torch.Tensor,
        bias2: torch.Tensor | None,
        call: _Call,
        draw1: torch.Tensor | None,
        draw2: torch.Tensor | None,
    ) -> Any:
        (plan1, plan2), dtype = call.plans, call.dtype
        needs1, needs2 = _needs(ctx)
        x_columns, w_columns = columns_needed(plan1, needs1)
        given = Norm(norm_weight, norm_bias, call.options)
        normed = quantize_normed(rows, given, dtype, plan1, (x_columns, call.with_normed))
        w1 = quantize_weight(weight1, plan1, w_columns)
        hidden = product(normed.operands.rowwise, w1.rowwise, bias1, dtype)
        x_columns, w_columns = columns_needed(plan2, needs2)
        activated, value = quantize_activated(hidden, call.function, plan2, x_columns)
        w2 = quantize_weight(weight2, plan2, w_columns)
        y = product(activated.rowwise, w2.rowwise, bias2, dtype)
        plain1 = (rows if normed.value is None else normed.value, weight1)
        plain2 = (hidden if value is None else value, weight2)
        tensors1, layouts1 = operands_to_save(normed.operands, w1, plain1, plan1, needs1)
        tensors2, layouts2 = operands_to_save(activated, w2, plain2, plan2, needs2)
        of_norm = (rows, norm_weight, normed.mean, normed.rstd)
        ctx.save_for_backward(*tensors1, *tensors2, *of_norm, hidden)
        ctx.draws = (draw1, draw2)
        ctx.saved1 = Saved(layouts1, (dtype, weight1.dtype, _dtype(bias1)))
        ctx.saved2 = Saved(layouts2, (dtype, weight2.dtype, _dtype(bias2)))
        ctx.norm_bias_dtype = _dtype(norm_bias)
        ctx.call = call
        return (y, normed.value) if call.with_normed else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return without_derivative(_backward(ctx, *grads))
        return _backward(ctx, *grads)


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _needs(ctx: Any) -> tuple[Needs, Needs]:
    """Which gradients the two layers' products are needed for."""
    needed = ctx.needs_input_grad
    first = Needs(any(needed[:3]), needed[3], needed[4])
    return first, Needs(any(needed[:5]), needed[5], needed[6])


def _backward(
    ctx: Any, grad: torch.Tensor, grad_normed: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    *tensors, hidden = ctx.saved_tensors
    operands1, operands2, of_norm = (
        tuple(tensors[:SAVED_TENSORS]),
        tuple(tensors[SAVED_TENSORS : 2 * SAVED_TENSORS]),
        tuple(tensors[2 * SAVED_TENSORS :]),
    )
    call: _Call = ctx.call
    plan1, plan2 = call.plans
    needs1, needs2 = _needs(ctx)
    found: tuple[torch.Tensor | None, ...] = (None, None, None)
    first: Gradients = (None, None, None)
    dactivated, dw2, db2 = gradients(grad, operands2, ctx.saved2, plan2, needs2, ctx.draws[1])
    if dactivated is not None:
        saved = (operands1, ctx.saved1, plan1, needs1)
        first = activated_gradients(dactivated, hidden, call.function, saved, ctx.draws[0])
    dnormed = first[0]
    if dnormed is not None:
        needed = ctx.needs_input_grad[:3]
        dnormed = dnormed if grad_normed is None else dnormed + grad_normed
        found = norm_gradients(dnormed, of_norm, call.options, ctx.norm_bias_dtype, needed)
    return *found, *first[1:], dw2, db2, None, None, None
