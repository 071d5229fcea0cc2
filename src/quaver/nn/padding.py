"""Rows of groups padded to a multiple, for code that aligns the inputs of grouped products itself.

Quaver's own layers take any number of rows and need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from quaver.devices import on_device
from quaver.recipe import DEFAULT_RECIPE, MXFP8BlockScaling, NVFP4BlockScaling
from quaver.scaling import current_region

_BLOCKS = (MXFP8BlockScaling, NVFP4BlockScaling)


class _Aligned(nn.Module):
    """What padding and unpadding share: how many groups, and what their rows are a multiple of."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise ValueError(f"align_size must be at least 1 or None, not {align_size}")
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """The sizes `m_splits`, each rounded up.

        Raises:
            ValueError: there are not `num_gemms` of them.
        """
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits must have {self.num_gemms} sizes, not {len(m_splits)}")
        align = self.align_size
        if align is None:
            region = current_region()
            recipe = (None if region is None else region.recipe) or DEFAULT_RECIPE
            align = 32 if isinstance(recipe, _BLOCKS) else 16
        return [-(-size // align) * align for size in m_splits]

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Aligned):
    """Appends rows of zeros to each group, up to a multiple.

    Args:
        num_gemms: how many groups there are.
        align_size: what the sizes become multiples of; None: 32 where the recipe in force at the
            call is MXFP8 or NVFP4, else 16.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Pad.

        Args:
            inp: [sum(m_splits), features]; groups one after the other.
            m_splits: the number of rows of each.

        Returns:
            The padded groups, and how many rows each has now.
        """
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp, padded
        with on_device(inp.device):
            groups = inp.reshape(-1, inp.shape[-1]).split(list(m_splits))
            parts = [
                functional.pad(group, (0, 0, 0, size - group.shape[0]))
                for group, size in zip(groups, padded, strict=True)
            ]
            return torch.cat(parts), padded


class Fp8Unpadding(_Aligned):
    """Takes away again what `Fp8Padding` of the same arguments appended."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Take the rows of each group.

        Args:
            inp: the padded groups, one after the other.
            m_splits: the number of rows of each before padding.
        """
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp
        with on_device(inp.device):
            groups = inp.reshape(-1, inp.shape[-1]).split(padded)
            return torch.cat([g[:size] for g, size in zip(groups, m_splits, strict=True)])
