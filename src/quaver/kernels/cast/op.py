"""The operator `cast`."""

import math

import torch

from quaver.kernels.cast import reference
from quaver.kernels.door import Kernel
from quaver.kernels.library import define

_SCHEMA = (
    "(Tensor x, Tensor scale, Tensor(a!)? amax, Tensor? ready, int slot, ScalarType dtype, "
    "bool columnwise, int margin=0) -> (Tensor, Tensor, Tensor)"
)


def _fake(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data = x.new_empty(x.shape, dtype=dtype)
    rows = math.prod(x.shape[:-1])
    transposed = data.new_empty((x.shape[-1], rows) if columnwise else (0,))
    return data, transposed, scale.new_empty(1)


cast = define(Kernel(reference.cast, triton="quaver.kernels.cast.triton"), _SCHEMA, _fake)
