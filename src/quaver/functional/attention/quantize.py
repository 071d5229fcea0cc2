"""FP8 operands of attention, emulated: each is quantized, and what it then stands for is used.

Forward: Q, K, V, S (the attention's weights, after dropout) and O. Backward: dO, and dP, the
gradient of q k^T, which is multiplied with K and Q.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch

from quaver.kernels import operand_values
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.state import RecipeState, Request, Scales
from quaver.scaling.used import Used
from quaver.tensors.payload import Operand, Payload

FORWARD_SLOTS: Final = ("query", "key", "value", "attention_weight", "attention_output")
BACKWARD_SLOTS: Final = ("grad_attention_output", "grad_score")
QUERY, KEY, VALUE, WEIGHT, OUTPUT = range(5)
GRAD_OUTPUT, GRAD_SCORE = range(2)


class AttentionPlan(NamedTuple):
    """How one attention is quantized.

    Attributes:
        forward, backward: the states with the slots above.
        record: whether the forward's amaxes are recorded.
        again: in a recomputation, the scales of the first run.
        passes: where the backward notes that it recorded amaxes.
        outer: in a recomputation, the backward pass around it.
        calibrating: record, and compute in high precision.
        gradients: whether dO and dP are quantized.
        hands_on: whether O is handed on as it was quantized.
    """

    forward: RecipeState
    backward: RecipeState
    record: bool
    again: Scales | None
    passes: BackwardPasses
    outer: Used | None
    calibrating: bool = False
    gradients: bool = True
    hands_on: bool = False


def quantized(x: torch.Tensor, slot: int, plan: AttentionPlan | None) -> torch.Tensor:
    """x [..., K] as its quantized values stand for, in its dtype; gradients pass unchanged."""
    if plan is None:
        return x
    if plan.calibrating:
        plan.forward.observe(x.detach(), slot)
        return x
    plan.forward.expect(slot)
    values: torch.Tensor = _Forward.apply(x, slot, plan)  # type: ignore[no-untyped-call]
    return values


def quantized_output(
    x: torch.Tensor, plan: AttentionPlan | None
) -> tuple[torch.Tensor, Payload | None]:
    """As `quantized`, of the output [b, h, s, d]; and the payload, if it is to be handed on."""
    if plan is None or plan.calibrating or not plan.hands_on:
        return quantized(x, OUTPUT, plan), None
    plan.forward.expect(OUTPUT)
    values, data, scale_inv = _Output.apply(x, plan)  # type: ignore[no-untyped-call]
    return values, Payload(data, scale_inv)


def quantized_gradient(x: torch.Tensor, slot: int, plan: AttentionPlan | None) -> torch.Tensor:
    """x itself; the gradient that comes back to it is quantized."""
    if plan is None or plan.calibrating or not plan.gradients or not torch.is_grad_enabled():
        return x
    plan.backward.expect(slot)
    same: torch.Tensor = _Backward.apply(x, slot, plan)  # type: ignore[no-untyped-call]
    return same


def _operand(x: torch.Tensor, slot: int, state: RecipeState, request: Request) -> Operand:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    operand = state.operands(rows, slot, request).rowwise
    if operand is None:
        raise ValueError("a quantization without the operand that was asked for")
    return operand


def _values(x: torch.Tensor, operand: Operand) -> torch.Tensor:
    """What the operand stands for, in the shape and dtype of x."""
    values: torch.Tensor = operand_values(
        operand.data, operand.scale_inv, operand.layout, operand.global_scale_inv
    )
    return values.view(x.shape).to(x.dtype)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: int, plan: AttentionPlan) -> torch.Tensor:
        request = Request(True, False, plan.record, plan.again)
        return _values(x, _operand(x, slot, plan.forward, request))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        request = Request(True, False, plan.record, plan.again)
        operand = _operand(x, OUTPUT, plan.forward, request)
        data = operand.data.view(x.shape)
        ctx.mark_non_differentiable(data, operand.scale_inv)
        return _values(x, operand), data, operand.scale_inv

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *others: Any) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: int, plan: AttentionPlan) -> torch.Tensor:
        ctx.slot = slot
        ctx.plan = plan
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: AttentionPlan = ctx.plan
        operand = _operand(grad, ctx.slot, plan.backward, Request(True, False, record=True))
        values = _values(grad, operand)
        if isinstance(plan.backward, DelayedScalingState) and not torch.compiler.is_compiling():
            plan.passes.note(plan.backward, plan.outer)
        return values, None, None
