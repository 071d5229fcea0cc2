"""The built-in rules: pure functions from a list of operations to a list of operations.

None looks at tensors or recipes: what is fused computes as the operations in turn do, under any.
"""

from __future__ import annotations

from collections.abc import Callable

from quaver.ops.activations import ActivationOperation
from quaver.ops.basic import BasicLinear, Bias, Linear
from quaver.ops.elementwise import ConstantScale
from quaver.ops.extra import AddExtraInput, MakeExtraOutput
from quaver.ops.fusions.linear import FusedLinear, LinearParts
from quaver.ops.fusions.norm import ForkedNorm
from quaver.ops.norms import LayerNorm, RMSNorm
from quaver.ops.operation import Step, computes_as

Rule = Callable[[list[Step]], list[Step]]
Join = Callable[[Step, Step], Step | None]


def joined(steps: list[Step], join: Join) -> list[Step]:
    """`steps` with each pair of neighbours replaced by what `join` makes of it; None: left alone.

    What a pair has become is joined with the next step in turn.
    """
    result: list[Step] = []
    for step in steps:
        pair = join(result[-1], step) if result else None
        if pair is None:
            result.append(step)
        else:
            result[-1] = pair
    return result


def _parts(step: Step) -> LinearParts | None:
    """The parts of a linear, fused or not; None: it is something else."""
    if isinstance(step, FusedLinear):
        return step.parts
    if isinstance(step, BasicLinear | Linear) and computes_as(step, BasicLinear, Linear):
        return LinearParts(step)
    return None


def linear_bias(steps: list[Step]) -> list[Step]:
    """Linear, bias: the bias is added in the product."""

    def join(left: Step, right: Step) -> Step | None:
        parts = _parts(left)
        if parts is None or not (isinstance(right, Bias) and computes_as(right, Bias)):
            return None
        if parts.linear.bias is not None or len(parts.in_order()) > 1:
            return None
        if right.size != parts.linear.out_features:  # Bias says so itself
            return None
        return FusedLinear(parts._replace(bias=right))

    return joined(steps, join)


def linear_activation(steps: list[Step]) -> list[Step]:
    """Linear, (bias,) activation: the backward of the activation casts, and sums for the bias."""

    def join(left: Step, right: Step) -> Step | None:
        parts = _parts(left)
        if parts is None or not isinstance(right, ActivationOperation):
            return None
        ends = parts.activation is None and parts.scale is None and parts.add is None
        if not ends or not computes_as(right, ActivationOperation):
            return None
        return FusedLinear(parts._replace(activation=right))

    return joined(steps, join)


def linear_scale_add(steps: list[Step]) -> list[Step]:
    """Linear, (bias,) scale, add, of which one may be missing: in the product's own memory."""

    def join(left: Step, right: Step) -> Step | None:
        parts = _parts(left)
        if parts is None or parts.activation is not None or parts.add is not None:
            return None
        if isinstance(right, ConstantScale) and computes_as(right, ConstantScale):
            return None if parts.scale is not None else FusedLinear(parts._replace(scale=right))
        if isinstance(right, AddExtraInput) and computes_as(right, AddExtraInput):
            return None if right.in_place else FusedLinear(parts._replace(add=right))
        return None

    return joined(steps, join)


def backward_linear_add(steps: list[Step]) -> list[Step]:
    """Extra output, linear: in the backward the extra output's gradient is added to dx in place."""

    def join(left: Step, right: Step) -> Step | None:
        parts = _parts(right)
        if parts is None or parts.output is not None:
            return None
        if not (isinstance(left, MakeExtraOutput) and computes_as(left, MakeExtraOutput)):
            return None
        return FusedLinear(parts._replace(output=left))

    return joined(steps, join)


def backward_add_norm(steps: list[Step]) -> list[Step]:
    """Extra output, norm: in the backward the extra output's gradient is added to dx in place."""

    def join(left: Step, right: Step) -> Step | None:
        if not (isinstance(left, MakeExtraOutput) and computes_as(left, MakeExtraOutput)):
            return None
        if isinstance(right, LayerNorm | RMSNorm) and computes_as(right, LayerNorm, RMSNorm):
            return ForkedNorm(left, right)
        return None

    return joined(steps, join)


BUILT_IN: tuple[Rule, ...] = (
    linear_bias,
    linear_activation,
    linear_scale_add,
    backward_linear_add,
    backward_add_norm,
)
"""In the order in which they are applied."""
