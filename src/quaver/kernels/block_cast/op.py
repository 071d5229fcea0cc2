"""The operators `block_cast` and `block_dequantize`."""

import torch

from quaver.kernels.block_cast import reference
from quaver.kernels.block_cast.blocks import Results, empty_usages
from quaver.kernels.door import Kernel
from quaver.kernels.library import define

_SCHEMA = (
    "(Tensor x, ScalarType dtype, int block_dim, bool power_2, float epsilon, bool rowwise, "
    "bool columnwise) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_dim: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> Results:
    block = reference.block_of(block_dim)
    return empty_usages(x, dtype, block, torch.float32, (rowwise, columnwise))


def _fake_dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, block_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    reference.block_of(block_dim)
    return torch.empty(data.shape, dtype=dtype, device=data.device)


_TRITON = "quaver.kernels.block_cast.triton"

block_cast = define(Kernel(reference.block_cast, triton=_TRITON), _SCHEMA, _fake)

block_dequantize = define(
    Kernel(reference.block_dequantize, triton=_TRITON),
    "(Tensor data, Tensor scale_inv, int block_dim, ScalarType dtype) -> Tensor",
    _fake_dequantize,
)
