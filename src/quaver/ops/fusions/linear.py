"""A linear with what stands before and after it, as one autograd function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quaver.devices import operands_device
from quaver.functional import activation_dtype
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
from quaver.functional.norm_mlp import Activation, activated_gradients
from quaver.kernels import activation
from quaver.nn.linear import QuantizedLinear
from quaver.ops.activations import ActivationOperation
from quaver.ops.basic import BasicLinear, Bias, Linear
from quaver.ops.elementwise import ConstantScale
from quaver.ops.extra import AddExtraInput, MakeExtraOutput, alias, check_same_shape, check_tensor
from quaver.ops.operation import FusedOperation, FusibleOperation
from quaver.scaling import Call


class LinearParts(NamedTuple):
    """The operations that one product is computed with, in the order in which they apply.

    Attributes:
        output: x is returned, too; the gradient that comes back for it is added to dx.
        linear: the product.
        bias: added in the product.
        activation: of the product; neither scale nor add follow then.
        scale: multiplies.
        add: adds the extra input.
    """

    linear: BasicLinear | Linear
    output: MakeExtraOutput | None = None
    bias: Bias | None = None
    activation: ActivationOperation | None = None
    scale: ConstantScale | None = None
    add: AddExtraInput | None = None

    def in_order(self) -> list[FusibleOperation]:
        """The operations that there are."""
        linear, output, *after = self
        return [part for part in (output, linear, *after) if part is not None]


class FusedLinear(FusedOperation):
    """A linear and its neighbours; without quantization they are called in turn."""

    def __init__(self, parts: LinearParts) -> None:
        super().__init__(parts.in_order())
        self.parts = parts

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """As the operations called in turn.

        Raises:
            DeviceMismatchError: x, a parameter or the extra input lie on two devices; nothing ran.
            QuaverError: the extra input is no tensor, or its shape is not the product's.
        """
        linear: QuantizedLinear = self.parts.linear
        bias = linear.bias if self.parts.bias is None else self.parts.bias.bias
        residual = extra_inputs[0] if extra_inputs else None
        if extra_inputs:
            check_tensor(residual)
        names = ("x", "weight", "bias", "the extra input")
        operands_device(names, (x, linear.weight, bias, residual))
        if self._keeps_dtype(x, residual):
            x = linear.prepare_forward(x)
            try:
                call = linear.current_call()
                if call.quantized:
                    return self._quantized(x, bias, residual, call)
            finally:
                linear.end_forward()
        return self.call_in_turn(x, *extra_inputs)

    def _keeps_dtype(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether no sum, forward or backward, would go from one dtype to another."""
        dtype = activation_dtype(x)
        summed = x if self.parts.output is not None else None
        return all(t is None or t.dtype == dtype for t in (summed, residual))

    def _quantized(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        call: Call,
    ) -> Any:
        output, function, scale = self.parts.output, self.parts.activation, self.parts.scale
        plan, weight = self.parts.linear.weight_plan(call), self.parts.linear.weight_matrix()
        expect_casts(weight, plan)
        dtype = activation_dtype(x)
        rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        if residual is not None:
            check_same_shape(shape, residual)
            residual = residual.reshape(rows.shape[0], shape[-1])
        epilogue = _Epilogue(
            plan,
            None if function is None else function.function(),
            None if scale is None else scale.scale,
            output is not None,
        )
        if torch.is_grad_enabled():
            y = _FusedLinear.apply(  # type: ignore[no-untyped-call]
                rows, weight, bias, residual, epilogue, plan.draw()
            )
            if output is not None:
                y, same = y
                return y.reshape(self._shape(shape, y)), same.reshape(x.shape)
        else:
            quantized = quantize_input(rows, plan, False)
            w = quantize_weight(weight, plan, False)
            y = epilogue.apply(product(quantized.rowwise, w.rowwise, bias, dtype), residual)
        y = y.reshape(self._shape(shape, y))
        return y if output is None else (y, x)

    @staticmethod
    def _shape(shape: torch.Size, y: torch.Tensor) -> tuple[int, ...]:
        return (*shape[:-1], y.shape[-1])  # a gated activation has halved the last


class _Epilogue(NamedTuple):
    """How a product goes on, and how it is quantized."""

    plan: LinearPlan
    function: Activation | None
    scale: float | None
    with_input: bool

    def apply(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """What becomes of the product y [M, N], which may be overwritten."""
        if self.function is not None:
            name, limit, alpha = self.function
            activated: torch.Tensor = activation(y, name, y.dtype, limit, alpha)
            return activated
        if self.scale is not None:
            y = y.mul_(self.scale)  # not add's alpha, which would be rounded to 16 bits on a CPU
        return y if residual is None else y.add_(residual)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        epilogue: _Epilogue,
        draw: torch.Tensor | None,
    ) -> Any:
        if not torch.compiler.is_compiling():  # a traced graph has zeros instead of None
            ctx.set_materialize_grads(False)
        plan = epilogue.plan
        needs = Needs(*ctx.needs_input_grad[:3])
        x_columns, w_columns = columns_needed(plan, needs)
        x = quantize_input(rows, plan, x_columns)
        w = quantize_weight(weight, plan, w_columns)
        hidden = product(x.rowwise, w.rowwise, bias, rows.dtype)
        y = epilogue.apply(hidden, residual)
        tensors, layouts = operands_to_save(x, w, (rows, weight), plan, needs)
        ctx.save_for_backward(*tensors, None if epilogue.function is None else hidden)
        ctx.draw = draw
        dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.saved = Saved(layouts, dtypes)
        ctx.epilogue = epilogue
        return (y, alias(rows)) if epilogue.with_input else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return without_derivative(_backward(ctx, *grads))
        return _backward(ctx, *grads)


def _backward(
    ctx: Any, grad: torch.Tensor | None, grad_same: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    if grad is None:  # only the extra output was used
        return grad_same, None, None, None, None, None
    *tensors, hidden = ctx.saved_tensors
    draw = ctx.draw
    epilogue: _Epilogue = ctx.epilogue
    needs = Needs(*ctx.needs_input_grad[:3])
    operands = tuple(tensors[:SAVED_TENSORS])
    of_product = grad if epilogue.scale is None else grad * epilogue.scale
    if epilogue.function is None:
        found = gradients(of_product, operands, ctx.saved, epilogue.plan, needs, draw)
    else:
        saved = (operands, ctx.saved, epilogue.plan, needs)
        found = activated_gradients(grad, hidden, epilogue.function, saved, draw)
    dx, dw, db = found
    if dx is not None and grad_same is not None:
        dx = dx.add_(grad_same)
    return dx, dw, db, grad if ctx.needs_input_grad[3] else None, None, None
