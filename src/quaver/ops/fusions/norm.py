"""A norm whose input is an extra output, too: in the backward the two gradients are added."""

from __future__ import annotations

import math
from typing import Any

import torch

from quaver.functional import layer_norm, norm_dtype, rms_norm
from quaver.functional.norm import DEFAULT_RMS_EPS, NormPlan
from quaver.kernels import norm, norm_backward
from quaver.ops.extra import MakeExtraOutput, alias
from quaver.ops.norms import LayerNorm, RMSNorm
from quaver.ops.operation import FusedOperation

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ForkedNorm(FusedOperation):
    """MakeExtraOutput and a norm: dx = the norm's gradient + that of the extra output."""

    def __init__(self, output: MakeExtraOutput, norm: LayerNorm | RMSNorm) -> None:
        super().__init__([output, norm])
        self.norm = norm

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """norm(x), and x."""
        if not torch.is_grad_enabled() or x.dtype not in _DTYPES or x.dim() == 0:
            return self.call_in_turn(x)
        norm = self.norm
        eps = DEFAULT_RMS_EPS if norm.eps is None else norm.eps
        rms = isinstance(norm, RMSNorm)
        plan = NormPlan(eps, norm.zero_centered_gamma, rms, norm_dtype(x))
        bias = None if rms else norm.bias
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y, same = _ForkedNorm.apply(rows, norm.weight, bias, plan)  # type: ignore[no-untyped-call]
        return y.reshape(x.shape), same.reshape(x.shape)


class _ForkedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        plan: NormPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():  # a traced graph has zeros instead of None
            ctx.set_materialize_grads(False)
        y, mean, rstd = norm(x, weight, bias, *plan)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.plan = plan
        return y, alias(x)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_same: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad is None:  # only the extra output was used
            return grad_same, None, None, None
        x, weight, bias, mean, rstd = ctx.saved_tensors
        plan: NormPlan = ctx.plan
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dx, dweight, dbias = _differentiable(grad, (x, weight, bias), plan)
            if dx is not None and grad_same is not None:
                dx = dx + grad_same
            return dx, dweight, dbias, None
        dx, dweight, dbias = norm_backward(
            grad, x, weight, mean, rstd, plan.zero_centered, plan.rms
        )
        if needs_x and grad_same is not None:
            dx = dx.add_(grad_same)
        return (
            dx if needs_x else None,
            dweight if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            None,
        )


def _differentiable(
    grad: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], plan: NormPlan
) -> list[torch.Tensor | None]:
    """The norm's gradients as functions that have derivatives."""
    x, weight, bias = inputs
    if x is None:
        raise ValueError("a norm needs its input")
    if plan.rms:
        y = rms_norm(x, weight, plan.eps, plan.zero_centered)
    else:
        y = layer_norm(x, weight, bias, plan.eps, plan.zero_centered)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
