"""Rotary position embedding, written out as a specification."""

from __future__ import annotations

import torch

from quaver.errors import QuaverError


def check_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Raise unless the operands go together.

    Raises:
        QuaverError: says what they must be.
    """
    table = cos.shape
    fits = x.dim() == 3 and len(table) == 2 and sin.shape == table and table[1] % 2 == 0
    if not fits or table[1] > x.shape[-1] or positions.shape != x.shape[:1]:
        raise QuaverError(
            "rope needs x [t, h, d], cos and sin [positions, r] with an even r of at most d, and "
            f"positions [t], not {tuple(x.shape)}, {tuple(table)}, {tuple(sin.shape)} and "
            f"{tuple(positions.shape)}"
        )


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    transposed: bool = False,
) -> torch.Tensor:
    """y = R x for each head, where R turns the pairs of features by the angles of its position.

    Of a pair (a, b): a·cos_a - b·sin_a and b·cos_b + a·sin_b, each two rounded products and their
    rounded sum; transposed: a·cos_a + b·sin_b and b·cos_b - a·sin_a.

    Args:
        x: [t, h, d], any strides.
        cos, sin: float32 [positions, r], contiguous; the dtype that is computed in. Features from r
            on stay as they are.
        positions: int64 [t], a row of cos and sin for each token.
        interleaved: the pairs are the features 2i and 2i + 1; otherwise i and i + r/2.
        transposed: multiply with the transpose of R, for gradients.

    Returns:
        [t, h, d], contiguous, in the dtype of x.
    """
    check_rope(x, cos, sin, positions)
    width = cos.shape[1]
    wide = x[..., :width].to(cos.dtype)
    c, s = cos[positions][:, None], sin[positions][:, None]
    if transposed:
        turned = wide * c - _turned(wide * s, interleaved)
    else:
        turned = wide * c + _turned(wide, interleaved) * s
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def _turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-b, a) of each pair (a, b)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
