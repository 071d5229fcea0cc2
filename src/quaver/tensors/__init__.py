"""Quantized tensors: a torch.Tensor subclass for the boundaries, plain payloads for the inside."""

from quaver.tensors import float8_ops as float8_ops
from quaver.tensors.base import DEQUANTIZED, QuantizedTensor
from quaver.tensors.float8 import Float8Tensor
from quaver.tensors.payload import Payload

__all__ = ["DEQUANTIZED", "Float8Tensor", "Payload", "QuantizedTensor"]
