"""`cast_grad` in Triton: the cast sums each of its tiles; a second launch adds those sums up."""

from __future__ import annotations

import torch

from quaver.formats import MAX
from quaver.kernels.common import triton_cast
from quaver.kernels.common.triton_cast import Scaling, cast_matrix
from quaver.kernels.common.triton_launch import cdiv
from quaver.kernels.common.triton_sums import sum_parts
from quaver.kernels.common.triton_tiles import partial_amax


def cast_grad(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference, but for the order of the sums."""
    rows, columns = x.shape
    tiles = max(cdiv(rows, triton_cast.BOTH_TILE.rows), 1)  # one without rows leaves sums of 0
    sums = torch.empty((tiles, columns), dtype=torch.float32, device=x.device)
    parts = None if ready is None else partial_amax(x, ready, slot)
    scaling = Scaling(scale, amax, ready, parts, slot, MAX[dtype] * 2.0**-margin)
    results = cast_matrix(x, x.shape, dtype, columnwise, scaling, sums)
    return *results, sum_parts(sums, torch.float32)
