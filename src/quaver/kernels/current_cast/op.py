"""The operator `current_cast`."""

import torch

from quaver.kernels.current_cast import reference
from quaver.kernels.door import Kernel
from quaver.kernels.library import define

_SCHEMA = (
    "(Tensor x, ScalarType dtype, bool power_2, float epsilon, Tensor? amax, bool columnwise) "
    "-> (Tensor, Tensor, Tensor)"
)


def _fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
    amax: torch.Tensor | None,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    data = torch.empty((rows, columns), dtype=dtype, device=x.device)
    transposed = data.new_empty((columns, rows) if columnwise else (0,))
    return data, transposed, data.new_empty(1, dtype=torch.float32)


current_cast = define(
    Kernel(reference.current_cast, triton="quaver.kernels.current_cast.triton"), _SCHEMA, _fake
)
