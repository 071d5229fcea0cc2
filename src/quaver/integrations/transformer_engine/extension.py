"""`transformer_engine_torch`: the enumerations that scripts name, without any kernels."""

from __future__ import annotations

import enum

import torch

from quaver.integrations.transformer_engine.options import transformer_engine_name

_NAME = "transformer_engine_torch"


@transformer_engine_name(_NAME)
class DType(enum.IntEnum):
    """Data types by the numbers that checkpoints hold."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


@transformer_engine_name(_NAME)
class FP8FwdTensors(enum.IntEnum):
    """The slots of a forward state."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


@transformer_engine_name(_NAME)
class FP8BwdTensors(enum.IntEnum):
    """The slots of a backward state."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


TE_DTYPE: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.int16: DType.kInt16,
    torch.int32: DType.kInt32,
    torch.int64: DType.kInt64,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.float8_e8m0fnu: DType.kFloat8E8M0,
}
"""The number of each torch dtype."""

TORCH_DTYPE = {number: dtype for dtype, number in TE_DTYPE.items()}
"""The torch dtype of each number that has one."""


def dtype_of(dtype: torch.dtype) -> DType:
    """The number of a torch dtype."""
    return TE_DTYPE[dtype]
