"""The fuser: computes a list of fusible operations, some of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from quaver.devices import on_device, operands_device
from quaver.ops.basic import BasicLinear, Bias, FusibleOperation

Step = Callable[[torch.Tensor], torch.Tensor]


class LinearBias:
    """BasicLinear followed by Bias in one product with the bias added in it."""

    def __init__(self, linear: BasicLinear, bias: Bias) -> None:
        self.linear = linear
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `bias(linear(x))`."""
        linear, bias = self.linear, self.bias.bias
        operands_device(("x", "weight", "bias"), (x, linear.weight, bias))
        x = linear.prepare_forward(x)
        try:
            call = linear.current_call()
            if call.quantized:
                return linear.forward_quantized(x, bias, call)
        finally:
            linear.end_forward()
        y: torch.Tensor = self.bias(linear(x))
        return y


def fuse(operations: Sequence[FusibleOperation]) -> list[Step]:
    """The steps that compute `operations`, in order.

    An operation that somebody has hooked into (a hook, a replaced or overridden forward) is called
    as it is, so that what was added runs.
    """
    steps: list[Step] = []
    i = 0
    while i < len(operations):
        operation = operations[i]
        following = operations[i + 1] if i + 1 < len(operations) else None
        if (
            isinstance(operation, BasicLinear)
            and isinstance(following, Bias)
            and not (_hooked(operation) or _hooked(following))
        ):
            steps.append(LinearBias(operation, following))
            i += 2
        else:
            steps.append(operation)
            i += 1
    return steps


def _hooked(module: nn.Module) -> bool:
    hooks = (
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
    overridden = type(module).forward not in (BasicLinear.forward, Bias.forward)
    return any(hooks) or any(everywhere) or overridden or "forward" in module.__dict__


class OperationFuser:
    """Computes fusible operations one after the other, with the input's device current.

    Args:
        operations: in the order in which they apply.
    """

    def __init__(self, operations: Sequence[FusibleOperation]) -> None:
        self.steps = fuse(operations)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last operation; the current device is restored, also on an error."""
        with on_device(x.device):
            for step in self.steps:
                x = step(x)
        return x
