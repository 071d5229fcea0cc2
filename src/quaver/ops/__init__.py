"""Fusible operations, and the containers that compute them together."""

from quaver.ops.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from quaver.ops.basic import BasicLinear, Bias, Linear
from quaver.ops.collectives import AllGather, AllReduce, ReduceScatter
from quaver.ops.elementwise import ConstantScale, Dropout, Identity, Reshape
from quaver.ops.extra import AddExtraInput, MakeExtraOutput
from quaver.ops.fuser import OperationFuser, register_fusion
from quaver.ops.grouped import GroupedLinear
from quaver.ops.norms import L2Normalization, LayerNorm, RMSNorm
from quaver.ops.operation import FusedOperation, FusibleOperation
from quaver.ops.quantize import Quantize
from quaver.ops.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "register_fusion",
]
