"""The operator `dequantize`."""

import torch

from quaver.kernels.dequantize import reference
from quaver.kernels.door import Kernel
from quaver.kernels.library import define


def _fake(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(data, dtype=dtype)


dequantize = define(
    Kernel(reference.dequantize, triton="quaver.kernels.dequantize.triton"),
    "(Tensor data, Tensor scale_inv, ScalarType dtype) -> Tensor",
    _fake,
)
