"""Chains of operations that are fused, with their twins that are called one after the other."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import quaver as qv
from quaver import ops
from quaver.ops.fuser import fuse
from quaver.ops.fusions.linear import FusedLinear
from quaver.ops.fusions.norm import ForkedNorm
from quaver.recipe import Recipe
from tests.samples import normal

IN, OUT, ROWS = 32, 24, 16


class Chain(NamedTuple):
    """Operations, and what they are fused to.

    Attributes:
        make: the operations, given device and dtype of their parameters.
        fused: the types of the steps.
        width: of the output.
    """

    make: Callable[..., list[nn.Module]]
    fused: tuple[type, ...]
    width: int = OUT


ONE = (FusedLinear,)


def _activated(name: str, width: int = OUT, **options: Any) -> Chain:
    def make(**factory: Any) -> list[nn.Module]:
        activation = getattr(ops, name)(**options)
        return [ops.BasicLinear(IN, OUT, **factory), ops.Bias(OUT, **factory), activation]

    return Chain(make, ONE, width)


CHAINS: dict[str, Chain] = {
    "linear_bias": Chain(lambda **f: [ops.BasicLinear(IN, OUT, **f), ops.Bias(OUT, **f)], ONE),
    "linear_bias_gelu": _activated("GELU"),
    "linear_bias_swiglu": _activated("SwiGLU", OUT // 2),
    "linear_bias_clamped": _activated("ClampedSwiGLU", OUT // 2, limit=0.5, alpha=1.1),
    "linear_relu": Chain(lambda **f: [ops.BasicLinear(IN, OUT, **f), ops.ReLU()], ONE),
    "biased_linear_silu": Chain(lambda **f: [ops.Linear(IN, OUT, **f), ops.SiLU()], ONE),
    "linear_add": Chain(lambda **f: [ops.BasicLinear(IN, OUT, **f), ops.AddExtraInput()], ONE),
    "linear_bias_add": Chain(
        lambda **f: [ops.BasicLinear(IN, OUT, **f), ops.Bias(OUT, **f), ops.AddExtraInput()], ONE
    ),
    "linear_scale": Chain(lambda **f: [ops.Linear(IN, OUT, **f), ops.ConstantScale(-0.3)], ONE),
    "linear_scale_add": Chain(
        lambda **f: [ops.Linear(IN, OUT, **f), ops.ConstantScale(0.7), ops.AddExtraInput()], ONE
    ),
    "output_linear": Chain(lambda **f: [ops.MakeExtraOutput(), ops.BasicLinear(IN, OUT, **f)], ONE),
    "output_linear_gelu": Chain(
        lambda **f: [ops.MakeExtraOutput(), ops.Linear(IN, OUT, **f), ops.GELU()], ONE
    ),
    "output_linear_add": Chain(
        lambda **f: [ops.MakeExtraOutput(), ops.Linear(IN, OUT, **f), ops.AddExtraInput()], ONE
    ),
    "output_rms": Chain(
        lambda **f: [ops.MakeExtraOutput(), ops.RMSNorm(IN, zero_centered_gamma=True, **f)],
        (ForkedNorm,),
        IN,
    ),
    "output_norm": Chain(
        lambda **f: [ops.MakeExtraOutput(), ops.LayerNorm(IN, **f)], (ForkedNorm,), IN
    ),
    "block": Chain(
        lambda **f: [
            ops.MakeExtraOutput(),
            ops.RMSNorm(IN, **f),
            ops.Linear(IN, 2 * OUT, **f),
            ops.SwiGLU(),
            ops.BasicLinear(OUT, IN, **f),
            ops.AddExtraInput(),
        ],
        (ForkedNorm, FusedLinear, FusedLinear),
        IN,
    ),
}


def make(name: str, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> ops.Sequential:
    """The chain with parameters that are the same everywhere."""
    model = ops.Sequential(*CHAINS[name].make(device=device, dtype=dtype))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(normal(*parameter.shape, name=key) * 0.3)
    for key, module in model.named_children():
        module.qualified_name = f"{name}.{key}"
    return model


def unfused(model: nn.Module) -> nn.Module:
    """The same operations, called one after the other: each has a hook, which does nothing."""
    twin = copy.deepcopy(model)
    for operation in twin.modules():
        if isinstance(operation, ops.FusibleOperation):
            operation.register_forward_hook(lambda *args: None)
    if isinstance(twin, ops.Sequential):
        assert fuse(list(twin)) == list(twin)
    return twin


def step(
    name: str,
    model: nn.Module,
    recipe: Recipe | None,
    *,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    number: int = 0,
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a training step of the chain `name`, on the CPU."""

    def tensor(width: int, what: str) -> torch.Tensor:
        values = normal(4, ROWS // 4, width, name=f"{what} {number}") * 2.0**number
        return values.to(dtype).to(device).requires_grad_()

    extra = range(model.num_extra_inputs)
    inputs = [tensor(IN, "x"), *(tensor(CHAINS[name].width, f"extra {i}") for i in extra)]
    with qv.autocast(enabled=recipe is not None, recipe=recipe):
        found = model(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    assert len(outputs) == 1 + model.num_extra_outputs
    grads = [normal(*y.shape, name=f"dy {i}").to(y.dtype).to(device) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    results = {f"y{i}": y.detach().cpu() for i, y in enumerate(outputs)}
    results |= {f"dx{i}": x.grad.cpu() for i, x in enumerate(inputs)}
    results |= {key: p.grad.cpu().clone() for key, p in model.named_parameters()}
    model.zero_grad()
    return results
