"""Quantize: a tensor, or its gradient, as the recipe's format can hold it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from quaver.errors import QuaverError
from quaver.functional import dequantized
from quaver.functional.gemm import LinearPlan, note_backward, without_derivative
from quaver.kernels import operand_values
from quaver.nn.base import QuantizedModule
from quaver.ops.operation import FusibleOperation
from quaver.recipe import Recipe
from quaver.scaling import Call, RecipeState, backward_passes
from quaver.scaling.state import Request


class Quantize(QuantizedModule, FusibleOperation):
    """y = x rounded to the values that its quantized form stands for, in x's dtype.

    The recipe in force quantizes x as a layer's input and the gradient as that of an output, with
    scaling states of this module's own. Without a recipe y is x; `convert` attaches none to it.

    Args:
        forward: whether x is quantized.
        backward: whether the gradient for x is.
        recipe: in force where no `autocast` names one.

    Raises:
        QuaverError: neither is to be quantized.
    """

    slots_per_gemm: ClassVar[dict[str, int]] = {"forward": 1, "backward": 1}
    slot_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "forward": ("input",),
        "backward": ("grad_output",),
    }

    def __init__(
        self, forward: bool = True, backward: bool = False, *, recipe: Recipe | None = None
    ) -> None:
        super().__init__()
        if not (forward or backward):
            raise QuaverError(
                "Quantize(forward=False, backward=False) does nothing; take Identity()"
            )
        self._init_quantized(recipe)
        self.quantizes_forward = forward
        self.quantizes_backward = backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] in the recipe's format and back, on its own device.

        Raises:
            TypeError: x is not of a high-precision floating-point dtype.
        """
        x = self.prepare_forward(dequantized(x))
        try:
            call = self.current_call()
            if call.quantized:
                return self._quantized(x, call)
            if call.recipe is not None and self.quantizes_forward:
                self.recipe_states["forward"].observe(x.detach(), 0)
            return x
        finally:
            self.end_forward()

    def _quantized(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        states = self.recipe_states
        plan = LinearPlan(
            states["forward"],
            states["backward"],
            bool(call.record),
            call.again,
            backward_passes(),
            call.outer,
            drawn=call.drawn,
        )
        draw = None
        backward = self.quantizes_backward and torch.is_grad_enabled()
        if self.quantizes_forward:
            plan.forward.expect(0)
        if backward:
            plan.backward.expect(0)
            draw = plan.draw()
        which = (self.quantizes_forward, backward)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y: torch.Tensor = _Quantize.apply(rows, plan, which, draw)  # type: ignore[no-untyped-call]
        return y.reshape(x.shape)

    def _check_operands(self, x: torch.Tensor) -> None:
        if not x.is_floating_point() or x.element_size() == 1:
            raise TypeError(f"x must be of a high-precision floating-point dtype, not {x.dtype}")
        if x.dim() == 0:
            raise QuaverError("x must have at least one dimension, not be a scalar")

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}"


def _values(x: torch.Tensor, state: RecipeState, request: Request) -> torch.Tensor:
    """What x [M, K], quantized by the state's one slot, stands for, in x's dtype."""
    operand = state.operands(x, 0, request).rowwise
    if operand is None:
        raise ValueError("a quantization without the operand that was asked for")
    values: torch.Tensor = operand_values(
        operand.data, operand.scale_inv, operand.layout, operand.global_scale_inv
    )
    width = x.shape[1]  # FP4 fills an odd width up with a zero
    return (values if values.shape[1] == width else values[:, :width]).to(x.dtype)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        plan: LinearPlan,
        which: tuple[bool, bool],
        draw: torch.Tensor | None,
    ) -> torch.Tensor:
        forward, ctx.quantizes = which
        ctx.plan = plan
        ctx.draw = draw
        if not forward:
            return x.view_as(x)
        return _values(x, plan.forward, Request(True, False, plan.record, plan.again))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.quantizes:
            return grad, None, None, None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            with torch.no_grad():
                return without_derivative(_backward(ctx, grad))
        return _backward(ctx, grad)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    values = _values(grad, ctx.plan.backward, Request(True, False, True, None, ctx.draw))
    note_backward(ctx.plan)
    return values, None, None, None
