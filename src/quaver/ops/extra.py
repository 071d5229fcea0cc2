"""Operations with a second input or output, as residual connections need them."""

from __future__ import annotations

import torch

from quaver.devices import operands_device
from quaver.errors import QuaverError
from quaver.ops.operation import FusibleOperation


class AddExtraInput(FusibleOperation):
    """y = x + extra input.

    Args:
        in_place: write the sum into the extra input.
    """

    num_extra_inputs = 1

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor, extra_input: torch.Tensor) -> torch.Tensor:
        """The sum, in the wider of the two dtypes; with `in_place` in the extra input's.

        Raises:
            DeviceMismatchError: the two lie on two devices.
            QuaverError: the extra input is no tensor, or their shapes differ.
        """
        check_tensor(extra_input)
        operands_device(("x", "the extra input"), (x, extra_input))
        check_same_shape(x.shape, extra_input)
        return extra_input.add_(x) if self.in_place else x + extra_input

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return "in_place=True" if self.in_place else ""


def check_tensor(extra_input: object) -> None:
    """Refuse what is no tensor, such as None.

    Raises:
        QuaverError: it is none.
    """
    if not isinstance(extra_input, torch.Tensor):
        raise QuaverError(f"the extra input must be a tensor, not {extra_input!r}")


def check_same_shape(shape: torch.Size, extra_input: torch.Tensor) -> None:
    """Refuse an extra input that would be broadcast, or broadcast the other.

    Raises:
        QuaverError: its shape is not `shape`.
    """
    if extra_input.shape != shape:
        raise QuaverError(
            f"the extra input must have the shape {tuple(shape)} of what it is added to, not "
            f"{tuple(extra_input.shape)}"
        )


class MakeExtraOutput(FusibleOperation):
    """y = x, and x once more as an extra output; in the backward the two gradients are added."""

    num_extra_outputs = 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x twice."""
        return x, x


def alias(x: torch.Tensor) -> torch.Tensor:
    """x once more, as an autograd function's forward may return it beside another output.

    It is no view, since autograd refuses to let one of several such views be written to; its
    version is x's, so that what has saved x notices. A trace would not derive it that way.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x.detach()
