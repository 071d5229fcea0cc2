"""Which norm or activation a module computes: told by what it gives, not by its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from quaver.conversion.fusion.source import UnrecognizedError
from quaver.devices import on_device
from quaver.functional import activation, rms_norm
from quaver.kernels.activation.names import GATED, PLAIN
from quaver.nn import LayerNorm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CLOSE = 1e-5
"""Of float32 values: some roundings apart. The two forms of GELU differ by 5e-4."""


class NormSpec(NamedTuple):
    """A norm, in the words of `LayerNormLinear`."""

    normalization: str
    eps: float
    zero_centered_gamma: bool


def looks_like_norm(module: nn.Module) -> bool:
    """Whether `module` is called a norm and has the parameters of one."""
    weight = module._parameters.get("weight")
    named = "norm" in type(module).__name__.lower()
    return named and weight is not None and weight.dim() == 1 and not module._modules


def norm_of(module: nn.Module) -> NormSpec:
    """Which norm `module` computes.

    Raises:
        UnrecognizedError: none that the fused modules have.
    """
    weight = module.weight
    if not isinstance(weight, nn.Parameter) or weight.dtype not in _DTYPES:
        raise UnrecognizedError("its weight is no float32, bfloat16 or float16 parameter")
    if type(module) in (nn.LayerNorm, LayerNorm):
        centered = getattr(module, "zero_centered_gamma", False)
        return NormSpec("LayerNorm", float(module.eps), centered)  # type: ignore[arg-type]
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if isinstance(eps, float) and set(module._parameters) == {"weight"} and not module._buffers:
        wide = _widened(module, weight)
        factory: dict[str, Any] = {"dtype": torch.float32, "device": weight.device}
        x = torch.sin(torch.arange(4 * len(weight), **factory)).reshape(4, -1)
        x = x * torch.tensor([[1e-4], [1e-2], [1.0], [1e2]], **factory)
        with on_device(weight.device), torch.no_grad():
            given = _output(wide, x)
            for centered in (False, True):
                if _equal(given, rms_norm(x, weight.float(), eps, centered)):
                    return NormSpec("RMSNorm", eps, centered)
    name = type(module).__name__
    raise UnrecognizedError(f"{name} gives the values of neither a layer norm nor an RMS norm")


def _widened(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    """A copy of the norm with a float32 weight, so that nothing is rounded more than that."""
    copy = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = {"weight": nn.Parameter(weight.detach().float())}
    return copy


def activation_of(function: object, gated: bool) -> str:
    """The name of the activation that `function` computes, or of the one whose gate it is.

    Raises:
        UnrecognizedError: none that `LayerNormMLP` has.
    """
    name = type(function).__name__ if isinstance(function, nn.Module) else repr(function)
    if isinstance(function, nn.Module) and [*function.parameters(), *function.buffers()]:
        raise UnrecognizedError(f"the activation {name} has parameters or buffers of its own")
    x = torch.linspace(-12, 12, 97, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        given = _output(function, x)
        nonlinearities = {GATED[key]: key for key in GATED if GATED[key] in (*PLAIN, "sigmoid")}
        for nonlinearity in nonlinearities if gated else PLAIN:
            expected = x.sigmoid() if nonlinearity == "sigmoid" else activation(x, nonlinearity)
            if _equal(given, expected):
                return nonlinearities[nonlinearity] if gated else nonlinearity
    kinds = ", ".join(nonlinearities if gated else PLAIN)
    raise UnrecognizedError(
        f"the activation {name} gives the values of none of {kinds} (gelu: tanh's)"
    )


def _output(function: object, x: torch.Tensor) -> object:
    """f(x), past hooks; None if it cannot be called so."""
    call: Callable[..., object]
    if isinstance(function, nn.Module):
        call = type(function).forward.__get__(function)
    elif callable(function):
        call = function
    else:
        return None
    try:
        return call(x)
    except Exception:
        return None


def _equal(given: object, expected: torch.Tensor) -> bool:
    if not isinstance(given, torch.Tensor) or given.shape != expected.shape:
        return False
    error = (given.float() - expected).abs()
    return bool((error <= _CLOSE * (expected.abs() + expected.abs().mean())).all())
