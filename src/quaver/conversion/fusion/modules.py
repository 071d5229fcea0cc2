"""What modules become whose work a fused module does: their places and objects stay."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quaver.errors import QuaverError
from quaver.nn import LayerNormMLP


class Columns(nn.Module):
    """A projection whose product was computed, along with others, where the norm stands.

    Attributes:
        columns: which of its input's last dimension are its output, from and to.
        width: how many its input has.
    """

    columns: tuple[int, int]
    width: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its own columns of x [..., width], a view.

        Raises:
            QuaverError: x is something else than the fused product.
        """
        if x.shape[-1] != self.width:
            raise QuaverError(
                f"a fused projection takes what the norm before it gives, {self.width} columns, "
                f"not shape {tuple(x.shape)}; convert_back undoes the fusion"
            )
        first, last = self.columns
        return x[..., first:last]

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"{self.columns[0]}:{self.columns[1]} of {self.width}"


class _Idle(nn.Module):
    """Base of those whose work is done elsewhere: says so to who hooks into them."""

    hooks_see: ClassVar[str]

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module, with a warning."""
        self._warn()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module, with a warning."""
        self._warn()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module, with a warning."""
        self._warn()
        return super().register_full_backward_hook(*args, **kwargs)

    def _warn(self) -> None:
        warnings.warn(
            f"this module was fused with others: a hook on it {self.hooks_see}; register hooks "
            "before convert(fuse=True), which then leaves the module as it is",
            stacklevel=3,
        )


class PassThrough(_Idle):
    """A norm that is computed by the fused module after it."""

    hooks_see = "sees what was to be normed, and not the norm's output"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as it is."""
        return x

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return ""


class Absorbed(_Idle):
    """A linear layer inside a fused module, which multiplies with its weight itself."""

    hooks_see = "never runs"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called by the fused module.

        Raises:
            QuaverError: always.
        """
        raise QuaverError(
            "this linear layer is part of the fused module that holds it, and cannot be called "
            "by itself; convert_back undoes the fusion"
        )

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return ""


class LayerNormMLPDropout(LayerNormMLP):
    """LayerNormMLP with the dropout of the module that it was made from.

    Attributes:
        dropouts: names of the children that are called on the output, in order.
    """

    dropouts: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As `LayerNormMLP.forward`, then the dropout."""
        y = super().forward(x, is_first_microbatch)
        for name in self.dropouts:
            y = self._modules[name](y)  # type: ignore[misc]
        return y
