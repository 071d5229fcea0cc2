"""What fusible operations are, and how they and their extra tensors are called in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from quaver.errors import QuaverError


class FusibleOperation(nn.Module):
    """Mark of a module that `Sequential` may compute together with its neighbours.

    Its forward takes x, then `num_extra_inputs` further tensors, and returns y, or a tuple of y and
    `num_extra_outputs` further tensors if there are any.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0


class FusedOperation:
    """Several operations that are computed together; base class.

    A subclass says in `__call__(x, *extra_inputs)` how. It must return what the operations return
    when they are called in turn: y, or a tuple of y and the extra outputs if there are any.

    Args:
        operations: what it stands for, in order.
    """

    def __init__(self, operations: Sequence[FusibleOperation]) -> None:
        self.operations = tuple(operations)

    @property
    def num_extra_inputs(self) -> int:
        """How many extra tensors the operations take."""
        return sum(operation.num_extra_inputs for operation in self.operations)

    @property
    def num_extra_outputs(self) -> int:
        """How many extra tensors the operations return."""
        return sum(operation.num_extra_outputs for operation in self.operations)

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """As the operations called in turn."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is computed")

    def call_in_turn(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """The operations called one after the other."""
        return results(*call_in_turn(self.operations, x, extra_inputs))

    def __repr__(self) -> str:
        names = ", ".join(type(operation).__name__ for operation in self.operations)
        return f"{type(self).__name__}({names})"


Step = FusibleOperation | FusedOperation
"""What a list of operations becomes a list of."""


def basic_operations(steps: Sequence[Step]) -> list[FusibleOperation]:
    """The operations that `steps` stand for, in order."""
    found: list[FusibleOperation] = []
    for step in steps:
        found += step.operations if isinstance(step, FusedOperation) else [step]
    return found


def extra_inputs_of(step: Any) -> int:
    """How many extra tensors a module or a fused operation takes; other modules take none."""
    return int(getattr(step, "num_extra_inputs", 0))


def extra_outputs_of(step: Any) -> int:
    """How many extra tensors a module or a fused operation returns; other modules return none."""
    return int(getattr(step, "num_extra_outputs", 0))


def check_extra_inputs(steps: Sequence[Any], extra_inputs: Sequence[torch.Tensor]) -> None:
    """Raise unless there is an extra input for each that `steps` take.

    Raises:
        QuaverError: names the operations that take them.
    """
    expected = sum(extra_inputs_of(step) for step in steps)
    if len(extra_inputs) != expected:
        takers = [type(step).__name__ for step in steps if extra_inputs_of(step)]
        whose = f" (of {', '.join(takers)})" if takers else ""
        raise QuaverError(
            f"{expected} extra inputs{whose} must follow x, in the order of the operations, not "
            f"{len(extra_inputs)}"
        )


def call_in_turn(
    steps: Sequence[Any], x: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Call `steps` one after the other, each with the extra inputs that are its own.

    Returns:
        The last one's y, and the extra outputs of all.
    """
    extra_outputs: list[torch.Tensor] = []
    taken = 0
    for step in steps:
        end = taken + extra_inputs_of(step)
        y = step(x, *extra_inputs[taken:end])
        taken = end
        if extra_outputs_of(step):
            y, *further = y
            extra_outputs += further
        x = y
    return x, extra_outputs


def results(y: torch.Tensor, extra_outputs: Sequence[torch.Tensor]) -> Any:
    """Y alone, or a tuple with the extra outputs."""
    return (y, *extra_outputs) if extra_outputs else y


def is_hooked(module: nn.Module) -> bool:
    """Whether calling `module` runs anything beside its class's forward."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    everywhere = (
        module_globals._global_forward_hooks,
        module_globals._global_forward_pre_hooks,
        module_globals._global_backward_hooks,
        module_globals._global_backward_pre_hooks,
    )
    return any(own) or any(everywhere) or "forward" in module.__dict__


def computes_as(step: object, *kinds: type[nn.Module]) -> bool:
    """Whether `step` is of one of `kinds` and has that class's forward, not one of its own."""
    return any(isinstance(step, kind) and type(step).forward is kind.forward for kind in kinds)
