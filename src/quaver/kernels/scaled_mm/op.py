"""The operator `scaled_mm`."""

import torch

from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.scaled_mm import reference

_SCHEMA = (
    "(Tensor a, Tensor a_scale_inv, Tensor b, Tensor b_scale_inv, Tensor? bias, ScalarType dtype) "
    "-> Tensor"
)


def _fake(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


scaled_mm = define(Kernel(reference.scaled_mm), _SCHEMA, _fake)
