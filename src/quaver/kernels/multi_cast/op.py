"""The operator `multi_cast`."""

import torch

from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.multi_cast import reference


def _fake(
    xs: list[torch.Tensor],
    data: list[torch.Tensor],
    transposed: list[torch.Tensor],
    scale_inv: list[torch.Tensor],
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
) -> None:
    return None


multi_cast = define(
    Kernel(reference.multi_cast),
    "(Tensor[] xs, Tensor(a!)[] data, Tensor(b!)[] transposed, Tensor(c!)[] scale_inv, "
    "ScalarType dtype, bool power_2, float epsilon) -> ()",
    _fake,
)
