"""Which key each query may attend to, and ALiBi's bias.

Positions are compared along a diagonal: query i stands beside key i + shift. For the causal masks
of the top left the shift is 0; for all others it is the number of keys less that of queries, so
that the last query stands beside the last key.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

MASK_TYPES: Final = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)
TOP_LEFT: Final = ("causal", "padding_causal")

Window = tuple[int, int]
"""How many keys to the left and to the right of its own a query attends to; -1: all."""

UNBOUNDED: Final[Window] = (-1, -1)


class Tokens(NamedTuple):
    """Which tokens of a padded batch are real.

    Attributes:
        queries: bool [b, sq].
        keys: bool [b, sk].
    """

    queries: torch.Tensor
    keys: torch.Tensor


def window_of(mask_type: str, window_size: int | Window | None) -> Window:
    """The window that a user's `window_size` means under a mask type.

    Args:
        window_size: None or (-1, -1): none. An integer n is (n, n), or (n, 0) under a causal mask.

    Raises:
        ValueError: an unknown mask type, or a window that looks past what a causal mask allows.
    """
    if mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type must be one of {', '.join(MASK_TYPES)}, not {mask_type}")
    causal = "causal" in mask_type
    if window_size is None:
        window_size = UNBOUNDED
    if isinstance(window_size, int):
        window_size = (window_size, 0 if causal else window_size)
    left, right = window_size
    if min(left, right) < -1:
        raise ValueError(f"window_size must be two counts, or -1 for all, not {window_size}")
    if causal and right > 0:
        raise ValueError(
            f"window_size must end at the query under {mask_type}, as in ({left}, 0), not "
            f"{window_size}"
        )
    return left, 0 if causal else right


class Pattern(NamedTuple):
    """Everything that decides which key each query may attend to.

    Attributes:
        mask_type: one of MASK_TYPES.
        window: as `window_of` gives it; its right end is 0 for the causal masks.
        sizes: sq and sk.
        device: of the operands.
        tokens: of a padded batch, whose own lengths count; or None.
        given: for "arbitrary": bool [b or 1, h or 1, sq, sk], True where a key is masked out.
    """

    mask_type: str
    window: Window
    sizes: tuple[int, int]
    device: torch.device
    tokens: Tokens | None = None
    given: torch.Tensor | None = None


def distance(pattern: Pattern) -> torch.Tensor:
    """How far key j stands to the right of query i's own, int64 [b or 1, 1, sq, sk]."""
    queries, keys = (torch.arange(size, device=pattern.device) for size in pattern.sizes)
    steps = keys - queries[:, None]
    if pattern.mask_type in TOP_LEFT:
        return steps[None, None]
    if pattern.tokens is None:
        return (steps - (pattern.sizes[1] - pattern.sizes[0]))[None, None]
    shift = pattern.tokens.keys.sum(-1) - pattern.tokens.queries.sum(-1)
    return steps - shift[:, None, None, None]


def allowed(pattern: Pattern) -> torch.Tensor | None:
    """Which key each query may attend to, bool [b or 1, h or 1, sq, sk]; None: all of them."""
    found: torch.Tensor | None = None
    if pattern.tokens is not None:
        found = pattern.tokens.queries[:, None, :, None] & pattern.tokens.keys[:, None, None, :]
    elif pattern.given is not None:
        found = ~pattern.given
    left, right = pattern.window
    one = pattern.sizes[0] == 1 and pattern.mask_type not in TOP_LEFT
    if one and found is None and pattern.window == (-1, 0):
        return None  # the one query stands beside the last key
    if left >= 0 or right >= 0:
        steps = distance(pattern)
        if left >= 0:
            after = steps >= -left
            found = after if found is None else found & after
        if right >= 0:
            before = steps <= right
            found = before if found is None else found & before
    return found


def is_plain_causal(pattern: Pattern) -> bool:
    """Whether query i attends to the keys 0 to i, and that is all."""
    if pattern.tokens is not None or pattern.given is not None or pattern.window != (-1, 0):
        return False
    return pattern.mask_type in TOP_LEFT or pattern.sizes[0] == pattern.sizes[1]


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slope of each head, float32 [h]: 2^(-8/n), 2^(-16/n), ... for n heads, a power of two.

    Other numbers of heads take the slopes of the next smaller power of two, then every second one
    of twice as many. Source: Press et al., "Train Short, Test Long", 2022, section 3.
    """
    whole = 2 ** math.floor(math.log2(heads))
    exponents = [-8.0 * (i + 1) / whole for i in range(whole)]
    exponents += [-4.0 * (2 * i + 1) / whole for i in range(heads - whole)]
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device=device)


def alibi_bias(slopes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """-slope · |distance|, float32 [b or 1, h, sq, sk].

    Args:
        slopes: [h] or [b, h].
        steps: what `distance` gives.
    """
    shaped = slopes.to(torch.float32).view(-1, slopes.shape[-1], 1, 1)
    return -shaped * steps.abs()
