"""The operators `mx_cast` and `mx_dequantize`."""

import torch

from quaver.kernels.block_cast.blocks import Results, empty_usages
from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.mx_cast import reference

_SCHEMA = (
    "(Tensor x, ScalarType dtype, bool rowwise, bool columnwise) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _fake(x: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Results:
    return empty_usages(x, dtype, reference.BLOCK, torch.float8_e8m0fnu, (rowwise, columnwise))


def _fake_dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


_TRITON = "quaver.kernels.mx_cast.triton"

mx_cast = define(Kernel(reference.mx_cast, triton=_TRITON), _SCHEMA, _fake)

mx_dequantize = define(
    Kernel(reference.mx_dequantize, triton=_TRITON),
    "(Tensor data, Tensor scale_inv, ScalarType dtype) -> Tensor",
    _fake_dequantize,
)
