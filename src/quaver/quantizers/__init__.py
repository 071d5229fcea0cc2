"""From high-precision tensors to quantized ones."""

from quaver.quantizers.float8 import Float8Quantizer

__all__ = ["Float8Quantizer"]
