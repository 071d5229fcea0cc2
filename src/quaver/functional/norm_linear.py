"""y = norm(x) W^T + b with the norm's output quantized, forward and backward."""

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
    operands_to_save,
    product,
    quantize_input,
    quantize_weight,
    without_derivative,
)
from quaver.functional.linear import activation_dtype
from quaver.kernels import norm, norm_backward, norm_cast
from quaver.scaling.delayed import DelayedScalingState, as_operands
from quaver.tensors import Quantized


class NormOptions(NamedTuple):
    """A norm's arguments that are no tensors.

    Attributes:
        eps: added to the variance, or to the mean square.
        zero_centered: 1 + weight multiplies.
        rms: RMS norm instead of layer norm.
    """

    eps: float
    zero_centered: bool
    rms: bool


class Norm(NamedTuple):
    """A norm: weight [K], bias [K] or None, and its options."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    options: NormOptions


class Normed(NamedTuple):
    """What a norm gives.

    Attributes:
        operands: its output, quantized.
        value: its output [M, K] in high precision, where there is one.
        mean, rstd: of each row, float32 [M]; the mean is empty with RMS norm.
    """

    operands: Quantized
    value: torch.Tensor | None
    mean: torch.Tensor
    rstd: torch.Tensor


def quantize_normed(
    rows: torch.Tensor,
    given: Norm,
    dtype: torch.dtype,
    plan: LinearPlan,
    request: tuple[bool, bool],
) -> Normed:
    """The norm of x, quantized as the plan's input.

    DelayedScaling quantizes it from float32; the other recipes round it to `dtype` first.

    Args:
        rows: x [M, K].
        dtype: of the value.
        request: whether the column-wise operand is wanted, and whether the value.
    """
    columnwise, wanted = request
    weight, bias, options = given
    state = plan.forward
    if not isinstance(state, DelayedScalingState):
        value, mean, rstd = norm(rows, weight, bias, *options, dtype)
        return Normed(quantize_input(value, plan, columnwise), value, mean, rstd)
    if wanted:
        wide, mean, rstd = norm(rows, weight, bias, *options, torch.float32)
        return Normed(quantize_input(wide, plan, columnwise), wide.to(dtype), mean, rstd)
    stored = columnwise and state.stores_transposed
    arguments = state.cast_arguments(plan.input_slot, plan.record, plan.again, stored)
    *cast, mean, rstd = norm_cast(rows, weight, bias, *options, *arguments)
    operands = as_operands(cast, True, columnwise)
    return Normed(operands, None, mean, rstd)


def norm_gradients(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    options: NormOptions,
    bias_dtype: torch.dtype | None,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for x, weight and bias; None where `needed` is False.

    Args:
        grad: of the norm's output [M, K].
        tensors: x [M, K], weight, mean and rstd.
    """
    x, weight, mean, rstd = tensors
    dx, dweight, dbias = norm_backward(
        grad, x, weight, mean, rstd, options.zero_centered, options.rms
    )
    if bias_dtype is not None:
        dbias = dbias.to(bias_dtype)
    found = (dx, dweight, None if bias_dtype is None else dbias)
    return tuple(each if need else None for each, need in zip(found, needed, strict=True))


def norm_linear(
    x: torch.Tensor,
    given: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: LinearPlan,
    with_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y = norm(x) W^T + b.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K], of its own dtype, or quantized.
        bias: [N] or None.
        with_normed: return norm(x), too.

    Returns:
        [..., N] and, if asked for, norm(x) [..., K], in the dtype that `activation_dtype(x)` names.
        Gradients come back in the dtypes of the operands.
    """
    expect_casts(weight, plan)
    dtype = activation_dtype(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    normed = None
    if torch.is_grad_enabled():
        draw = plan.draw()
        call = _Call(plan, given.options, dtype, with_normed)
        y = _NormLinear.apply(  # type: ignore[no-untyped-call]
            rows, given.weight, given.bias, weight, bias, call, draw
        )
        if with_normed:
            y, normed = y
    else:
        operands, normed, _, _ = quantize_normed(rows, given, dtype, plan, (False, with_normed))
        w = quantize_weight(weight, plan, False)
        y = product(operands.rowwise, w.rowwise, bias, dtype)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    if not with_normed or normed is None:
        return y, None
    return y, normed.reshape(x.shape)


class _Call(NamedTuple):
    plan: LinearPlan
    options: NormOptions
    dtype: torch.dtype
    with_normed: bool


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _Call,
        draw: torch.Tensor | None,
    ) -> Any:
        plan, dtype = call.plan, call.dtype
        needs = _needs(ctx)
        x_columns, w_columns = columns_needed(plan, needs)
        given = Norm(norm_weight, norm_bias, call.options)
        normed = quantize_normed(rows, given, dtype, plan, (x_columns, call.with_normed))
        w = quantize_weight(weight, plan, w_columns)
        y = product(normed.operands.rowwise, w.rowwise, bias, dtype)
        plain = (rows if normed.value is None else normed.value, weight)
        tensors, layouts = operands_to_save(normed.operands, w, plain, plan, needs)
        ctx.save_for_backward(*tensors, rows, norm_weight, normed.mean, normed.rstd)
        ctx.draw = draw
        dtypes = (dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.saved = Saved(layouts, dtypes)
        ctx.norm_bias_dtype = None if norm_bias is None else norm_bias.dtype
        ctx.plan, ctx.options = plan, call.options
        return (y, normed.value) if call.with_normed else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return without_derivative(_backward(ctx, *grads))
        return _backward(ctx, *grads)


def _needs(ctx: Any) -> Needs:
    """What the product's gradients are needed for: that of its input for all of the norm's."""
    needed = ctx.needs_input_grad
    return Needs(any(needed[:3]), needed[3], needed[4])


def _backward(
    ctx: Any, grad: torch.Tensor, grad_normed: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    operands, of_norm = tensors[:SAVED_TENSORS], tensors[SAVED_TENSORS:]
    dnormed, dw, db = gradients(grad, operands, ctx.saved, ctx.plan, _needs(ctx), ctx.draw)
    found: tuple[torch.Tensor | None, ...] = (None, None, None)
    if dnormed is not None:
        if grad_normed is not None:
            dnormed = dnormed + grad_normed
        needed = ctx.needs_input_grad[:3]
        found = norm_gradients(dnormed, of_norm, ctx.options, ctx.norm_bias_dtype, needed)
    return *found, dw, db, None, None
