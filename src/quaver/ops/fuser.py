"""The fuser: computes a list of fusible operations, some of them together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from quaver.devices import on_device
from quaver.errors import QuaverError
from quaver.ops.fusions.rules import BUILT_IN, Rule
from quaver.ops.operation import (
    FusedOperation,
    FusibleOperation,
    Step,
    basic_operations,
    call_in_turn,
    check_extra_inputs,
    is_hooked,
    results,
)

_first: OrderedDict[int, Rule] = OrderedDict()
_last: OrderedDict[int, Rule] = OrderedDict()


def register_fusion(rule: Rule, *, prepend: bool = False) -> RemovableHandle:
    """Let the fuser apply a rule of yours.

    Args:
        rule: a pure function from a list of operations to a list in which some of them are replaced
            by a `FusedOperation` that stands for the same operations in the same order. It is
            called on each forward, and must look at nothing but the list. What was fused by earlier
            rules stands in it as their FusedOperation. Hooked operations never do.
        prepend: apply it before the built-in rules; otherwise after them. In either place rules
            apply in the order in which they were registered.

    Returns:
        A handle whose `remove()` takes the rule out again.

    Raises:
        QuaverError: `rule` cannot be called.
    """
    if not callable(rule):
        raise QuaverError(f"a fusion must be a function of a list of operations, not {rule!r}")
    rules = _first if prepend else _last
    handle = RemovableHandle(rules)
    rules[handle.id] = rule
    return handle


def fuse(operations: Sequence[FusibleOperation]) -> list[Step]:
    """The steps that compute `operations`, in order.

    An operation that somebody has hooked into (a hook, a replaced forward) is called as it is, so
    that what was added runs; rules see the runs of operations between such ones.

    Raises:
        QuaverError: a registered fusion leaves out, adds or reorders operations.
    """
    steps: list[Step] = []
    run: list[Step] = []
    for operation in operations:
        if is_hooked(operation):
            steps += [*_rewritten(run), operation]
            run = []
        else:
            run.append(operation)
    return steps + _rewritten(run)


def _rewritten(run: list[Step]) -> list[Step]:
    for rule in _first.values():
        run = _checked(rule, run)
    for rule in BUILT_IN:
        run = rule(run)
    for rule in _last.values():
        run = _checked(rule, run)
    return run


def _checked(rule: Rule, steps: list[Step]) -> list[Step]:
    """What a registered rule makes of `steps`, if that stands for the same operations."""
    result = rule(list(steps))
    name = getattr(rule, "__name__", repr(rule))
    if not isinstance(result, list) or not all(
        isinstance(step, FusibleOperation | FusedOperation) for step in result
    ):
        raise QuaverError(
            f"the fusion {name} must return a list of FusibleOperation and FusedOperation, "
            f"not {result!r}"
        )
    before, after = basic_operations(steps), basic_operations(result)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise QuaverError(
            f"the fusion {name} must return steps that stand for {_names(before)}, in this order, "
            f"not for {_names(after)}"
        )
    return result


def _names(operations: Sequence[FusibleOperation]) -> str:
    return f"[{', '.join(type(operation).__name__ for operation in operations)}]"


class OperationFuser:
    """Computes fusible operations one after the other, with the input's device current.

    Args:
        operations: in the order in which they apply.
    """

    def __init__(self, operations: Sequence[FusibleOperation]) -> None:
        self.steps = fuse(operations)

    @property
    def num_extra_inputs(self) -> int:
        """How many extra tensors the operations take."""
        return sum(step.num_extra_inputs for step in self.steps)

    @property
    def num_extra_outputs(self) -> int:
        """How many extra tensors the operations return."""
        return sum(step.num_extra_outputs for step in self.steps)

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """The output of the last operation; the current device is restored, also on an error.

        Args:
            x: the first operation's input.
            extra_inputs: those of the operations that take some, in their order.

        Returns:
            y, or if operations have extra outputs a tuple of y and those, in their order.

        Raises:
            QuaverError: x is no tensor, or another number of extra inputs.
        """
        if not isinstance(x, torch.Tensor):
            raise QuaverError(f"x must be a tensor, not {x!r}")
        check_extra_inputs(self.steps, extra_inputs)
        with on_device(x.device):
            y, extra_outputs = call_in_turn(self.steps, x, extra_inputs)
        return results(y, extra_outputs)
