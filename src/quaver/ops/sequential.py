"""Sequential: torch's, which computes runs of fusible operations through the fuser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from quaver.ops.fuser import OperationFuser
from quaver.ops.operation import (
    FusibleOperation,
    call_in_turn,
    check_extra_inputs,
    extra_inputs_of,
    extra_outputs_of,
    is_hooked,
    results,
)


class Sequential(nn.Sequential):
    """torch.nn.Sequential; adjacent fusible operations are computed together.

    Other modules may stand between them, and are called as they are. The operations of a Sequential
    inside this one are fused with their neighbours, as if they stood here.
    """

    @property
    def num_extra_inputs(self) -> int:
        """How many extra tensors the modules take."""
        return sum(extra_inputs_of(module) for module in self)

    @property
    def num_extra_outputs(self) -> int:
        """How many extra tensors the modules return."""
        return sum(extra_outputs_of(module) for module in self)

    # torch's make an nn.Sequential, which would neither fuse nor take extra tensors

    def __add__(self, other: nn.Sequential) -> Sequential:
        """A Sequential of this one's modules and those of `other`."""
        return Sequential(*super().__add__(other))

    def __mul__(self, other: int) -> Sequential:
        """A Sequential of this one's modules, `other` times over."""
        return Sequential(*super().__mul__(other))

    def forward(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """The output of the last module.

        Args:
            x: the first module's input.
            extra_inputs: those of the operations that take some, such as AddExtraInput, in order.

        Returns:
            y, or if operations such as MakeExtraOutput have extra outputs a tuple of y and those,
            in their order.

        Raises:
            QuaverError: another number of extra inputs.
        """
        modules = list(_flattened(self))
        check_extra_inputs(modules, extra_inputs)
        extra_outputs: list[torch.Tensor] = []
        taken = 0
        for group in _groups(modules):
            end = taken + sum(extra_inputs_of(module) for module in group)
            own = extra_inputs[taken:end]
            taken = end
            fusible = isinstance(group[0], FusibleOperation)
            steps = [OperationFuser(group)] if fusible else group
            x, further = call_in_turn(steps, x, own)
            extra_outputs += further
        return results(x, extra_outputs)


def _flattened(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules, those of a Sequential inside instead of itself unless it is hooked."""
    for module in modules:
        if isinstance(module, Sequential) and _is_plain(module):
            yield from _flattened(module)
        else:
            yield module


def _is_plain(module: Sequential) -> bool:
    return type(module).forward is Sequential.forward and not is_hooked(module)


def _groups(modules: Iterable[nn.Module]) -> list[list[Any]]:
    """Runs of fusible operations, and the modules between them one by one."""
    groups: list[list[Any]] = []
    for module in modules:
        fusible = isinstance(module, FusibleOperation)
        if fusible and groups and isinstance(groups[-1][-1], FusibleOperation):
            groups[-1].append(module)
        else:
            groups.append([module])
    return groups
