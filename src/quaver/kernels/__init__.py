"""Kernels, one folder each: reference.py (PyTorch), op.py (schema, fake, dispatch).

A Triton version, where one pays, goes into triton.py of the same folder and is named in op.py.
"""

from quaver.kernels.amax.op import amax
from quaver.kernels.cast.op import cast
from quaver.kernels.dequantize.op import dequantize
from quaver.kernels.scale_update.op import custom_scale_update, scale_update
from quaver.kernels.scaled_mm.op import scaled_mm

__all__ = ["amax", "cast", "custom_scale_update", "dequantize", "scale_update", "scaled_mm"]
