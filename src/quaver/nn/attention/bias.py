"""What users add to the scores of attention: a bias, or ALiBi's."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from quaver.functional.attention.masks import Pattern, alibi_bias, alibi_slopes, distance

BIAS_TYPES: Final = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Bias(NamedTuple):
    """What is added to the scores, as users say it.

    Attributes:
        kind: one of BIAS_TYPES.
        given: [b or 1, h or 1, sq, sk], of the kinds pre_scale_bias and post_scale_bias.
        slopes: [h] or [b, h], of the kind alibi; None: those of the paper.
    """

    kind: str = "no_bias"
    given: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def check(self) -> None:
        """Raise unless kind and tensors go together.

        Raises:
            ValueError: says what does not.
        """
        if self.kind not in BIAS_TYPES:
            raise ValueError(
                f"core_attention_bias_type must be one of {', '.join(BIAS_TYPES)}, "
                f"not {self.kind!r}"
            )
        if (self.given is not None) != (self.kind in ("pre_scale_bias", "post_scale_bias")):
            raise ValueError(
                "core_attention_bias goes with core_attention_bias_type pre_scale_bias or "
                f"post_scale_bias, and only with them, not with {self.kind}"
            )
        if self.slopes is not None and self.kind != "alibi":
            raise ValueError(f"alibi_slopes goes with the bias type alibi, not with {self.kind}")

    def values(self, pattern: Pattern, heads: int, scale: float) -> torch.Tensor | None:
        """What is added to the scaled scores, at least float32, [b or 1, h or 1, sq, sk].

        Args:
            heads: how many.
            scale: of the scores, which a bias before the scale is multiplied with too.
        """
        if self.kind == "alibi":
            slopes = self.slopes
            if slopes is None:
                slopes = alibi_slopes(heads, pattern.device)
            if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
                raise ValueError(
                    f"alibi_slopes must be [{heads}] or [batch, {heads}], not {tuple(slopes.shape)}"
                )
            return alibi_bias(slopes, distance(pattern))
        if self.given is None:
            return None
        wide = self.given.to(torch.promote_types(torch.float32, self.given.dtype))
        return wide * scale if self.kind == "pre_scale_bias" else wide
