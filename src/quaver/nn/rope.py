"""The angles of rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RotaryPositionEmbedding(nn.Module):
    """The angles position · base^(-2i/r), which `apply_rotary_pos_emb` turns features by.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the
    interpolation: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.

    Args:
        dim: features of a head.
        rotary_percent: which part of them is turned, above 0 and at most 1.
        rotary_base: the base of the geometric sequence of frequencies.
        seq_len_interpolation_factor: positions are divided by it; None: they are not.
        interleaved: the pairs are neighbouring features; pass the same to `apply_rotary_pos_emb`.
        device: where the frequencies are, and the angles are made.

    The frequencies are float32 whatever dtype the module is cast to, and have no place in the
    state_dict.

    Raises:
        ValueError: a part of the features that is not an even number of them.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        *,
        rotary_base: float = 10000.0,
        seq_len_interpolation_factor: float | None = None,
        interleaved: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        width = int(dim * rotary_percent)
        if width < 2 or width % 2 or width > dim:
            raise ValueError(
                "rotary_percent must leave an even number of features, from 2 to dim, but "
                f"{rotary_percent} of {dim} are {width}"
            )
        self.width = width
        self.rotary_base = float(rotary_base)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.interleaved = interleaved
        place = torch.empty(0, device=device).device
        self.register_buffer("inv_freq", self._frequencies(place), persistent=False)

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        steps = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        return 1.0 / self.rotary_base**steps

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """The angles of the positions from `offset` on.

        Args:
            max_seq_len: how many positions.

        Returns:
            float32 [max_seq_len, 1, 1, width], in radians, on the module's device.
        """
        frequencies = self.inv_freq
        positions = torch.arange(
            offset, offset + max_seq_len, dtype=torch.float32, device=frequencies.device
        )
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        angles = positions[:, None] * frequencies
        if self.interleaved:
            both = angles.repeat_interleave(2, dim=-1)
        else:
            both = torch.cat((angles, angles), dim=-1)
        return both[:, None, None, :]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Another dtype would round them, and what comes from the meta device has no values yet.
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def extra_repr(self) -> str:
        """What distinguishes it, for `repr`."""
        return f"{self.width}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"
