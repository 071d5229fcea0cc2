"""The three products of a quantized linear, as pieces that fused layers put together.

fprop: y = x W^T + b; dgrad: dx = dy W; wgrad: dW = dy^T x. Plain tensors go in, plain tensors are
saved, and backward reads nothing ambient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quaver.errors import RecipeError
from quaver.functional.wgrad import WeightGradient
from quaver.kernels import operand_values, scaled_mm
from quaver.kernels.scaled_mm.layouts import BLOCK_2D, PLAIN
from quaver.recipe import BackwardOverride
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.state import BACKWARD_SLOTS, FORWARD_SLOTS, RecipeState, Request, Scales
from quaver.scaling.used import Used
from quaver.tensors import Operand, Quantized, QuantizedTensor


class LinearPlan(NamedTuple):
    """How one linear is quantized.

    Attributes:
        forward: the state with the slots input 0, weight 1 (of the first product).
        backward: the state with the slot grad_output 0.
        record: whether the forward's amaxes are recorded.
        again: in a recomputation, the scales of the first run.
        passes: where the backward notes that it recorded amaxes.
        outer: in a recomputation, the backward pass around it.
        weight: the weight's operands if they are kept from an earlier forward.
        override: what the backward computes with instead of quantized operands.
        gemm: which of the states' products this is; its slots come after those of the earlier.
        wgrad: where the weight's gradient goes, if not to autograd.
        keeps_input: save x as it came, and quantize it again for the backward.
        drawn: in a recomputation, the numbers that the first run drew (see `Call`).
    """

    forward: RecipeState
    backward: RecipeState
    record: bool
    again: Scales | None
    passes: BackwardPasses
    outer: Used | None
    weight: Quantized | None = None
    override: BackwardOverride = None
    gemm: int = 0
    wgrad: WeightGradient | None = None
    keeps_input: bool = False
    drawn: tuple[torch.Tensor, ...] | None = None

    def draw(self) -> torch.Tensor | None:
        """The number of this product's random bits; in a recomputation that of the first run.

        It is kept beside the saved tensors and not among them: of a checkpoint that is not
        reentrant these are the recomputation's, but everything else is the first run's.
        """
        if self.drawn is None:
            return self.backward.draw()
        return self.drawn[self.gemm] if self.drawn else None

    @property
    def input_slot(self) -> int:
        """The forward slot of the input; the weight's is the next."""
        return len(FORWARD_SLOTS) * self.gemm

    @property
    def grad_slot(self) -> int:
        """The backward slot of the output's gradient."""
        return len(BACKWARD_SLOTS) * self.gemm


class Needs(NamedTuple):
    """Which gradients a backward pass asks for."""

    x: bool
    weight: bool
    bias: bool


class Saved(NamedTuple):
    """What a backward pass needs of a forward, beside its tensors.

    Attributes:
        layouts: of x's and of the weight's operand.
        dtypes: of the gradients for x, weight and bias.
    """

    layouts: tuple[str, str]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]


SAVED_TENSORS = 6
"""How many tensors (some None) `operands_to_save` gives."""


def expect_casts(weight: torch.Tensor, plan: LinearPlan, x: torch.Tensor | None = None) -> None:
    """Say which slots the forward and, with grad, the backward are about to cast."""
    if not isinstance(x, QuantizedTensor):
        plan.forward.expect(plan.input_slot)
    if plan.weight is None and not isinstance(weight, QuantizedTensor):
        plan.forward.expect(plan.input_slot + 1)
    if torch.is_grad_enabled():
        plan.backward.expect(plan.grad_slot)


def quantize_input(x: torch.Tensor, plan: LinearPlan, columnwise: bool) -> Quantized:
    """x [M, K] as the input's operands: a quantized one's own, or a fresh cast.

    A column-wise operand that a quantized x does not hold, or that did not go through the Hadamard
    transform as the gradient will, is made from the values that x stands for.
    """
    if isinstance(x, QuantizedTensor):
        transformed = plan.forward.transforms(plan.input_slot)
        own = columnwise and x.hadamard == transformed
        operands = x.quantized(columnwise=own)
        if own or not columnwise:
            return operands
        request = Request(False, True, False, plan.again)
        made = plan.forward.operands(x.dequantize(), plan.input_slot, request)
        return operands._replace(columnwise=made.columnwise)
    request = Request(True, columnwise, plan.record, plan.again)
    return plan.forward.operands(x, plan.input_slot, request)


def quantize_weight(weight: torch.Tensor, plan: LinearPlan, columnwise: bool) -> Quantized:
    """The weight's operands: what the plan brings, a quantized parameter's own, or a fresh cast."""
    if plan.weight is not None:
        return plan.weight
    if isinstance(weight, QuantizedTensor):
        return weight.quantized(columnwise=columnwise)
    request = Request(True, columnwise, plan.record, plan.again)
    return plan.forward.operands(weight, plan.input_slot + 1, request)


def columns_needed(plan: LinearPlan, needs: Needs) -> tuple[bool, bool]:
    """Which of x's and the weight's column-wise operands the backward will multiply with."""
    if plan.override is not None:
        return False, False
    return needs.weight and not plan.keeps_input, needs.x


def product(
    a: Operand | None,
    b: Operand | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    accurate: bool = False,
) -> torch.Tensor:
    """A @ B^T + bias.

    Args:
        accurate: sum in float32 all along; otherwise the faster sums of the hardware will do.

    Raises:
        RecipeError: both operands have blocks of two dimensions.
    """
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
        accurate,
    )
    return y


def operands_to_save(
    x: Quantized,
    w: Quantized,
    plain: tuple[torch.Tensor, torch.Tensor],
    plan: LinearPlan,
    needs: Needs,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[str, str]]:
    """The tensors that a backward needs of the operands, and their layouts.

    Args:
        plain: x and the weight in high precision.
    """
    if plan.override == "high_precision":
        saved_x: Operand | None = _plain_columns(plain[0])
        saved_w: Operand | None = _plain_columns(plain[1])
    elif plan.override == "dequantized":  # row-wise: what the forward computed with
        saved_x, saved_w = x.rowwise, w.rowwise
    else:
        saved_x, saved_w = x.columnwise, w.columnwise
        if plan.keeps_input:
            saved_x = Operand(plain[0], None, PLAIN)
    x_tensors, x_layout = _flatten(saved_x if needs.weight else None)
    w_tensors, w_layout = _flatten(saved_w if needs.x else None)
    return (*x_tensors, *w_tensors), (x_layout, w_layout)


def gradients(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    saved: Saved,
    plan: LinearPlan,
    needs: Needs,
    draw: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx [M, K], dW [N, K] and db [N], each None where it is not needed.

    Args:
        grad: dy [M, N].
        tensors: what `operands_to_save` gave.
        draw: the number of the forward, for random bits.
    """
    override = plan.override
    if override is None:
        request = Request(needs.x, needs.weight, True, None, draw)
        g, db = plan.backward.grad_operands(grad, plan.grad_slot, request, needs.bias)
        note_backward(plan)
    else:
        g = Quantized(Operand(grad, None, PLAIN), _plain_columns(grad))
        db = grad.sum(0, dtype=torch.float32) if needs.bias else None
    return products(g, db, tensors, saved, plan, needs)


def note_backward(plan: LinearPlan) -> None:
    """Note that the backward state recorded an amax, for the update at the end of the pass."""
    if isinstance(plan.backward, DelayedScalingState) and not torch.compiler.is_compiling():
        plan.passes.note(plan.backward, plan.outer)


def products(
    g: Quantized,
    db: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
    saved: Saved,
    plan: LinearPlan,
    needs: Needs,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `gradients`, from the gradient's operands and the bias's gradient in float32."""
    x_dtype, w_dtype, bias_dtype = saved.dtypes
    dx = dw = None
    if needs.x:
        w = _unflatten(tensors[3:6], saved.layouts[1], plan.override)
        dx = product(g.rowwise, w, None, x_dtype, True)
    if needs.weight:
        if plan.keeps_input and plan.override is None:
            x = plan.forward.operands(tensors[0], plan.input_slot, Request(False, True)).columnwise
        else:
            x = _unflatten(tensors[:3], saved.layouts[0], plan.override)
        if plan.wgrad is None:
            dw = product(g.columnwise, x, None, w_dtype, True)
        else:
            dw = plan.wgrad.take(lambda dtype: product(g.columnwise, x, None, dtype, True), w_dtype)
    if db is not None and bias_dtype is not None and db.dtype != bias_dtype:
        db = db.to(bias_dtype)
    return dx, dw, db


def without_derivative(
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


def _flatten(operand: Operand | None) -> tuple[tuple[Any, ...], str]:
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
