"""The activations by name, and which of them are gated."""

from typing import Final

import torch

from quaver.errors import QuaverError

PLAIN: Final = ("gelu", "qgelu", "relu", "srelu", "silu")
"""Activations of each value."""

GATED: Final = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped_silu",
}
"""Gated activations, each with the nonlinearity of its gate."""

DEFAULT_LIMIT: Final = 7.0
DEFAULT_ALPHA: Final = 1.702
"""`clamped_swiglu`'s, as in gpt-oss."""


def is_gated(name: str) -> bool:
    """Whether the activation takes [M, 2H] and gives [M, H].

    Raises:
        QuaverError: there is no activation of that name.
    """
    if name in GATED:
        return True
    if name in PLAIN:
        return False
    known = ", ".join(sorted((*PLAIN, *GATED)))
    raise QuaverError(f"activation must be one of {known}, not {name!r}")


def nonlinearity_of(name: str) -> tuple[str, bool]:
    """The nonlinearity, and whether it is a gate's, of an activation."""
    return (GATED[name], True) if is_gated(name) else (name, False)


def activated_shape(x: torch.Tensor, name: str) -> tuple[int, int]:
    """The shape [M, H] of the activation of x [M, W].

    Raises:
        QuaverError: no such activation, x is no matrix, or its width is odd and the activation
            gated.
    """
    gated = is_gated(name)
    if x.dim() != 2:
        raise QuaverError(f"x must have 2 dimensions, not shape {tuple(x.shape)}; reshape it")
    rows, width = x.shape
    if gated and width % 2:
        raise QuaverError(
            f"{name} takes the first half of x's last dimension as the gate, so it must be even, "
            f"not {width}"
        )
    return rows, width // 2 if gated else width


def check_gradient(grad: torch.Tensor, x: torch.Tensor, name: str) -> None:
    """Refuse a gradient that has not the shape of the activation of x.

    Raises:
        QuaverError: so it is, or as `activated_shape` says.
    """
    expected = activated_shape(x, name)
    if tuple(grad.shape) != expected:
        raise QuaverError(
            f"grad must have the shape {expected} of {name} of x, not {tuple(grad.shape)}"
        )
