"""The nonlinearities and their derivatives, float32 to float32.

Sources: GELU's tanh form and x * sigmoid(1.702 x) are Hendrycks, Gimpel, "Gaussian Error Linear
Units" (2016); the gated forms Shazeer, "GLU Variants Improve Transformer" (2020); relu^2 So et al.,
"Primer" (2021); the clamped gate is gpt-oss's, where the other half is clamped, too, and 1 is
added to it.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

CUBIC: Final = 0.044715
TWO_ROOT: Final = 2.0 * math.sqrt(2.0 / math.pi)
QUICK: Final = 1.702
GELU_FLAT: Final = 16.0
"""Beyond it GELU's slope is 0 or 1 in float32; the polynomial of a larger x might overflow."""

Function = Callable[[torch.Tensor, float, float], torch.Tensor]


class Nonlinearity(NamedTuple):
    """A function and its derivative, both of (x, limit, alpha)."""

    value: Function
    slope: Function


def _gelu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """x/2 * (1 + tanh(p/2)) = x * sigmoid(p), p = 2 sqrt(2/pi) * (x + 0.044715 x^3).

    The right side loses no digits where tanh is near -1.
    """
    return x * torch.sigmoid(TWO_ROOT * (x + CUBIC * x * x * x))


def _gelu_slope(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    z = x.clamp(-GELU_FLAT, GELU_FLAT)
    s = torch.sigmoid(TWO_ROOT * (z + CUBIC * z * z * z))
    return s + z * s * (1.0 - s) * (TWO_ROOT * (1.0 + 3.0 * CUBIC * z * z))


def _sigmoid(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    return torch.sigmoid(x)


def _sigmoid_slope(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s)


def _swish(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * sigmoid(factor * x)."""
    return x * torch.sigmoid(factor * x)


def _swish_slope(x: torch.Tensor, factor: float) -> torch.Tensor:
    s = torch.sigmoid(factor * x)
    return s + x * s * (1.0 - s) * factor


def _clamped_silu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """z * sigmoid(alpha * z), z = min(x, limit)."""
    return _swish(x.clamp(max=limit), alpha)


def _clamped_silu_slope(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    return torch.where(x > limit, 0.0, _swish_slope(x, alpha))


NONLINEARITIES: Final = {
    "gelu": Nonlinearity(_gelu, _gelu_slope),
    "sigmoid": Nonlinearity(_sigmoid, _sigmoid_slope),
    "qgelu": Nonlinearity(
        lambda x, limit, alpha: _swish(x, QUICK), lambda x, limit, alpha: _swish_slope(x, QUICK)
    ),
    "relu": Nonlinearity(
        lambda x, limit, alpha: x.relu(),
        lambda x, limit, alpha: torch.where(x <= 0, 0.0, 1.0),
    ),
    "srelu": Nonlinearity(
        lambda x, limit, alpha: x.relu().square(), lambda x, limit, alpha: 2.0 * x.relu()
    ),
    "silu": Nonlinearity(
        lambda x, limit, alpha: _swish(x, 1.0), lambda x, limit, alpha: _swish_slope(x, 1.0)
    ),
    "clamped_silu": Nonlinearity(_clamped_silu, _clamped_silu_slope),
}


def linear_part(x: torch.Tensor, name: str, limit: float) -> torch.Tensor:
    """What multiplies the gate: x; for clamped_swiglu 1 + x held within +-limit."""
    return x.clamp(-limit, limit) + 1.0 if name == "clamped_swiglu" else x


def linear_slope(x: torch.Tensor, name: str, limit: float) -> torch.Tensor:
    """The derivative of `linear_part`."""
    return (
        torch.where(x.abs() > limit, 0.0, 1.0) if name == "clamped_swiglu" else torch.ones_like(x)
    )
