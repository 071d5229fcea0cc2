"""Autograd functions: plain tensors in, plain tensors saved."""

from quaver.functional.dequantize import dequantized
from quaver.functional.linear import LinearPlan, activation_dtype, linear, quantize_weight

__all__ = ["LinearPlan", "activation_dtype", "dequantized", "linear", "quantize_weight"]
