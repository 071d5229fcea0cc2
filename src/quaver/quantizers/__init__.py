"""From high-precision tensors to quantized ones."""

from quaver.quantizers.base import Quantizer
from quaver.quantizers.block import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from quaver.quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from quaver.quantizers.from_recipe import quantizer_of
from quaver.quantizers.identity import IdentityQuantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "quantizer_of",
]
