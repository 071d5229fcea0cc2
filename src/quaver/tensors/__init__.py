"""Quantized tensors: torch.Tensor subclasses for the boundaries, plain payloads for the inside."""

import torch as _torch

from quaver.tensors import operations as operations
from quaver.tensors.base import QuantizedTensor
from quaver.tensors.block import BlockTensor
from quaver.tensors.dispatch import DEQUANTIZED
from quaver.tensors.float8 import Float8Tensor
from quaver.tensors.float8_blockwise import Float8BlockwiseTensor
from quaver.tensors.mxfp8 import MXFP8Tensor
from quaver.tensors.nvfp4 import NVFP4Tensor
from quaver.tensors.payload import Operand, Payload, Quantized
from quaver.tensors.saving import restore

__all__ = [
    "DEQUANTIZED",
    "BlockTensor",
    "Float8BlockwiseTensor",
    "Float8Tensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "Operand",
    "Payload",
    "Quantized",
    "QuantizedTensor",
]

_torch.serialization.add_safe_globals(
    [Float8Tensor, Float8BlockwiseTensor, MXFP8Tensor, NVFP4Tensor, restore]
)
