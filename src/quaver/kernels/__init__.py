"""Kernels, one folder each: reference.py (PyTorch), op.py (schema, fake, dispatch).

A Triton version, where one pays, goes into triton.py of the same folder and is named in op.py.
"""

from quaver.kernels.activation.names import is_gated
from quaver.kernels.activation.op import (
    activation,
    activation_backward,
    activation_backward_cast,
    activation_cast,
)
from quaver.kernels.amax.op import amax
from quaver.kernels.block_cast.op import block_cast, block_dequantize
from quaver.kernels.cast.op import cast
from quaver.kernels.cast_grad.op import cast_grad
from quaver.kernels.current_cast.op import current_cast
from quaver.kernels.dequantize.op import dequantize
from quaver.kernels.door import use_implementation
from quaver.kernels.hadamard.op import hadamard
from quaver.kernels.multi_cast.op import multi_cast
from quaver.kernels.mx_cast.op import mx_cast, mx_dequantize
from quaver.kernels.norm.op import norm, norm_backward, norm_cast
from quaver.kernels.nvfp4_cast.op import nvfp4_cast, nvfp4_dequantize
from quaver.kernels.random_bits.op import next_number
from quaver.kernels.rope.op import rope
from quaver.kernels.scale_update.op import custom_scale_update, scale_update
from quaver.kernels.scaled_mm.op import operand_values, scaled_mm

__all__ = [
    "activation",
    "activation_backward",
    "activation_backward_cast",
    "activation_cast",
    "amax",
    "block_cast",
    "block_dequantize",
    "cast",
    "cast_grad",
    "current_cast",
    "custom_scale_update",
    "dequantize",
    "hadamard",
    "is_gated",
    "multi_cast",
    "mx_cast",
    "mx_dequantize",
    "next_number",
    "norm",
    "norm_backward",
    "norm_cast",
    "nvfp4_cast",
    "nvfp4_dequantize",
    "operand_values",
    "rope",
    "scale_update",
    "scaled_mm",
    "use_implementation",
]
