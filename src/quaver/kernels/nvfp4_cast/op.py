"""The operators `nvfp4_cast` and `nvfp4_dequantize`."""

import torch

from quaver.formats import E4M3
from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.nvfp4_cast import reference

# SymInt, so that a compiled program does not depend on the numbers that change with each step.
_CAST_SCHEMA = (
    "(Tensor x, bool two_dimensional, bool stochastic, SymInt seed, SymInt offset, bool rowwise, "
    "bool columnwise, Tensor? step=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_DEQUANTIZE_SCHEMA = (
    "(Tensor data, Tensor scale, Tensor global_scale_inv, bool two_dimensional, SymInt columns, "
    "ScalarType dtype) -> Tensor"
)

_Pair = tuple[torch.Tensor, torch.Tensor]


def _fake_cast(
    x: torch.Tensor,
    two_dimensional: bool,
    stochastic: bool,
    seed: int,
    offset: int,
    rowwise: bool,
    columnwise: bool,
    step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape

    def parts(wanted: bool, lines: int, length: int) -> _Pair:
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=E4M3)
        scales = (_blocks(lines) if two_dimensional else lines, _blocks(length))
        data = x.new_empty((lines, (length + 1) // 2), dtype=torch.uint8)
        return data, x.new_empty(scales, dtype=E4M3)

    global_scale_inv = x.new_empty(1, dtype=torch.float32)
    return *parts(rowwise, rows, columns), *parts(columnwise, columns, rows), global_scale_inv


def _fake_dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale_inv: torch.Tensor,
    two_dimensional: bool,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return data.new_empty((data.shape[0], columns), dtype=dtype)


def _blocks(length: int) -> int:
    return (length + reference.BLOCK - 1) // reference.BLOCK


_TRITON = "quaver.kernels.nvfp4_cast.triton"

nvfp4_cast = define(Kernel(reference.nvfp4_cast, triton=_TRITON), _CAST_SCHEMA, _fake_cast)
nvfp4_dequantize = define(
    Kernel(reference.nvfp4_dequantize, triton=_TRITON), _DEQUANTIZE_SCHEMA, _fake_dequantize
)
