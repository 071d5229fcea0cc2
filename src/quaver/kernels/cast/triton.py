"""`cast` in Triton: one pass over x, or two where the scale may never have been set."""

from __future__ import annotations

import torch

from quaver.formats import MAX
from quaver.kernels.common.triton_cast import Results, Scaling, as_matrix, cast_matrix
from quaver.kernels.common.triton_tiles import partial_amax


def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> Results:
    """As the reference."""
    matrix = as_matrix(x)
    parts = None if ready is None else partial_amax(matrix, ready, slot)
    scaling = Scaling(scale, amax, ready, parts, slot, MAX[dtype] * 2.0**-margin)
    return cast_matrix(matrix, x.shape, dtype, columnwise, scaling)
