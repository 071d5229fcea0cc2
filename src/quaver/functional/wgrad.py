"""Where the gradient of a weight goes when autograd is not to have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from quaver.errors import QuaverError

_overwritten = WeakTensorKeyDictionary()
"""The last backward pass that overwrote a weight's `main_grad`, by its number in autograd."""

Product = Callable[[torch.dtype], torch.Tensor]
"""Computes a gradient in the dtype that it is given."""


class WeightGradient:
    """Takes a weight's gradient of one forward: adds it to `main_grad`, puts it off, or both.

    Args:
        weight: whose gradient it is.
        fused: add it to `weight.main_grad` instead of handing it to autograd.
        overwrite: with `fused`, write it there instead of adding; what comes after in the same
            backward pass, of the module or of another with this weight, is added.
        delayed: where computations that are put off are kept, in order; None: compute at once.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        fused: bool,
        overwrite: bool = False,
        delayed: list[Callable[[], None]] | None = None,
    ) -> None:
        self.weight = weight
        self.fused = fused
        self.overwrite = overwrite
        self.delayed = delayed

    def take(self, compute: Product, dtype: torch.dtype) -> torch.Tensor | None:
        """The gradient for autograd; None where it went, or will go, elsewhere."""
        running = torch._C._current_graph_task_id() if self.overwrite else -1
        if self.delayed is not None:
            self.delayed.append(lambda: self._deliver(compute, dtype, running))
            return None
        if self.fused:
            self._deliver(compute, dtype, running)
            return None
        return compute(dtype)

    @torch.no_grad()
    def _deliver(self, compute: Product, dtype: torch.dtype, running: int) -> None:
        weight = self.weight
        if not self.fused:
            dw = compute(dtype)
            weight.grad = dw if weight.grad is None else weight.grad.add_(dw)
            return
        main_grad = getattr(weight, "main_grad", None)
        if not isinstance(main_grad, torch.Tensor):
            raise QuaverError(
                "fuse_wgrad_accumulation adds the weight's gradient to weight.main_grad, which "
                f"must be a tensor of shape {tuple(weight.shape)}, not {main_grad!r}"
            )
        dw = compute(main_grad.dtype)
        if self.overwrite and (running < 0 or _overwritten.get(weight) != running):
            main_grad.copy_(dw)
            _overwritten[weight] = running
        else:
            main_grad.add_(dw)


class _PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        taker: WeightGradient,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.taker = taker
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            columns = x.reshape(-1, x.shape[-1]).to(grad.dtype)

            def compute(dtype: torch.dtype) -> torch.Tensor:
                return torch.mm(rows.t(), columns).to(dtype)

            dw = ctx.taker.take(compute, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    taker: WeightGradient | None,
) -> torch.Tensor:
    """y = x W^T + b in high precision, with the weight's gradient handed to `taker`.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        taker: None: autograd gets the gradient.
    """
    if taker is None:
        return torch.nn.functional.linear(x, weight, bias)
    y: torch.Tensor = _PlainLinear.apply(x, weight, bias, taker)  # type: ignore[no-untyped-call]
    return y
