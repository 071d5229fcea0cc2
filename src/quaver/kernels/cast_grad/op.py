"""The operator `cast_grad`."""

import torch

from quaver.kernels.cast_grad import reference
from quaver.kernels.door import Kernel
from quaver.kernels.library import define

_SCHEMA = (
    "(Tensor x, Tensor scale, Tensor(a!)? amax, Tensor? ready, int slot, ScalarType dtype, "
    "bool columnwise, int margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    data = x.new_empty((rows, columns), dtype=dtype)
    transposed = data.new_empty((columns, rows) if columnwise else (0,))
    return data, transposed, scale.new_empty(1), scale.new_empty(columns)


cast_grad = define(
    Kernel(reference.cast_grad, triton="quaver.kernels.cast_grad.triton"), _SCHEMA, _fake
)
