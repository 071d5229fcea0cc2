"""Operations without parameters: dropout, a constant factor, other shapes, nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quaver.errors import QuaverError
from quaver.ops.operation import FusibleOperation


class Dropout(nn.Dropout, FusibleOperation):
    """torch.nn.Dropout as a fusible operation, with the same arguments."""


class ConstantScale(FusibleOperation):
    """y = scale * x.

    Args:
        scale: a number.

    Raises:
        QuaverError: `scale` is something else, such as a tensor.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not isinstance(scale, int | float) or isinstance(scale, bool):
            raise QuaverError(f"scale must be a number, not {scale!r}")
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale * x, in x's dtype."""
        return x * self.scale

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"scale={self.scale}"


class Identity(FusibleOperation):
    """y = x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x


class Reshape(FusibleOperation):
    """y = x.reshape(shape).

    Args:
        shape: of y; one size may be -1.

    Raises:
        QuaverError: `shape` is no sequence of sizes, or several of them are -1.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(size, int) and size >= -1 for size in sizes) or sizes.count(-1) > 1:
            raise QuaverError(f"shape must be sizes, of which one may be -1, not {shape!r}")
        self.shape = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x in the other shape; a view where that is possible."""
        return x.reshape(self.shape)

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"shape={self.shape}"
