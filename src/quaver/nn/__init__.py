"""Modules."""

from quaver.nn.base import QuantizedModule
from quaver.nn.init import quantized_model_init
from quaver.nn.linear import Linear, QuantizedLinear

__all__ = ["Linear", "QuantizedLinear", "QuantizedModule", "quantized_model_init"]
