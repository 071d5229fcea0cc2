"""The random Hadamard transform, written out as a specification."""

from typing import Final

import torch

BLOCK: Final = 16
"""Neighbours of the last dimension that are mixed with one another."""

SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs that each block is multiplied by first: fixed ones, those of TransformerEngine."""

_TILE_ROWS = 64


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """y = (x * SIGNS) @ H / 4 for each 16 neighbours of a row; H is Sylvester's Hadamard matrix.

    H / 4 is orthogonal and symmetric, so that `hadamard(a) @ hadamard(b).T` is `a @ b.T`; an
    outlier of one element is spread over its block.

    The float32 operations, each rounded on its own, which define the bits: the products with the
    signs; for the strides s = 1, 2, 4, 8, for each pair (a at i, b at i + s): a + b goes to i and
    a - b to i + s; the products with 0.25. NaN and inf spread over their block.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.

    Returns:
        float32 [M, 16 * ceil(K / 16)], contiguous: a short last block is filled with zeros before,
        and is whole afterwards, so that none of it may be cut off.
    """
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    return torch.cat([_transform(tile, signs) for tile in x.split(_TILE_ROWS)])


def _transform(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[1] % BLOCK))
    y = (padded.reshape(-1, BLOCK) * signs).t().contiguous()  # [16, blocks]: long vectors are added
    for stride in (1, 2, 4, 8):
        a, b = y.view(BLOCK // (2 * stride), 2, stride, y.shape[1]).unbind(1)
        y = torch.stack((a + b, a - b), dim=1).view(BLOCK, y.shape[1])
    return y.mul_(0.25).t().reshape(padded.shape)
