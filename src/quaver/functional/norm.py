"""Layer norm and RMS norm: float32 arithmetic on the input's device, gradients included."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quaver.devices import autocast_dtype, has_current
from quaver.errors import QuaverError
from quaver.kernels import norm, norm_backward
from quaver.kernels.norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

DEFAULT_RMS_EPS = torch.finfo(torch.float32).eps
"""torch.nn.RMSNorm's, in whose float32 arithmetic it is added."""


class NormPlan(NamedTuple):
    """How one norm is computed: the arguments of the kernels that are no tensors."""

    eps: float
    zero_centered: bool
    rms: bool
    dtype: torch.dtype


def norm_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a norm of x: x's own, but float32 under `torch.autocast` on an accelerator.

    There torch's norms are among what autocast keeps in float32; on the CPU they are not.
    """
    if has_current(x.device) and autocast_dtype(x.device.type) is not None:
        return torch.float32
    return x.dtype


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> torch.Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [K], or None for 1; with `zero_centered`, 1 + weight multiplies.
        bias: [K], or None.
        eps: added to the variance.

    Returns:
        [..., K] in the dtype that `norm_dtype(x)` names. Gradients come back in the dtypes of x,
        weight and bias.

    Raises:
        QuaverError: x is of another dtype, or the parameters have not the shape [K].
        DeviceMismatchError: the operands lie on two devices.
    """
    return _norm(x, weight, bias, NormPlan(eps, zero_centered, False, norm_dtype(x)))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        eps: added to the mean square; None: that of float32, as in torch.
        x, weight, zero_centered: as in `layer_norm`, and so are the result and the errors.
    """
    plan = NormPlan(DEFAULT_RMS_EPS if eps is None else eps, zero_centered, True, norm_dtype(x))
    return _norm(x, weight, None, plan)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, plan: NormPlan
) -> torch.Tensor:
    if x.dtype not in _DTYPES:
        raise QuaverError(
            f"x must be float32, bfloat16 or float16, in float32 arithmetic, not {x.dtype}; "
            "torch's own norms take it"
        )
    if x.dim() == 0:
        raise QuaverError("x must have at least one dimension, over which the norm goes")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled():
        y: torch.Tensor = _Norm.apply(rows, weight, bias, plan)  # type: ignore[no-untyped-call]
    else:
        y, _, _ = norm(rows, weight, bias, *plan)
    return y.reshape(x.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        plan: NormPlan,
    ) -> torch.Tensor:
        y: torch.Tensor
        y, mean, rstd = norm(x, weight, bias, *plan)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        plan: NormPlan = ctx.plan
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return *_differentiable(grad, x, weight, bias, plan), None
        dx, dweight, dbias = norm_backward(
            grad, x, weight, mean, rstd, plan.zero_centered, plan.rms
        )
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            dx if needs_x else None,
            dweight if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            None,
        )


def _differentiable(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: NormPlan,
) -> list[torch.Tensor | None]:
    """The gradients as functions that have derivatives, from the plain composition."""
    inputs = (x, weight, bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    y, _, _ = reference.norm(x, weight, bias, *plan)
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
