"""What all quantizers share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch

from quaver.errors import RecipeError
from quaver.formats import MAX
from quaver.tensors import Quantized, QuantizedTensor

Draw = torch.Tensor | None
"""An int64 [1] on the device of what is quantized."""


class Quantizer(ABC):
    """From a high-precision tensor to a quantized one, on the device where it lives.

    Attributes:
        rowwise, columnwise: the copies that a call makes.
        draws_bits: whether it rounds at random.
        transposes_losslessly: whether the column-wise copy is the transpose of the row-wise one.
    """

    transposes_losslessly = False
    draws_bits = False

    def __init__(self, rowwise: bool, columnwise: bool) -> None:
        if not (rowwise or columnwise):
            raise RecipeError("at least one of rowwise and columnwise must be True")
        self.rowwise = rowwise
        self.columnwise = columnwise

    @abstractmethod
    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] as operands of matrix products.

        Args:
            rowwise, columnwise: which operands to make.
            draw: the number of the random bits, where there are any; None: the quantizer's own.
            group: the process group of an amax reduction, where there is one.
        """

    @abstractmethod
    def wrap(self, quantized: Quantized, like: torch.Tensor) -> QuantizedTensor:
        """The operands as a tensor with the shape and nominal dtype of `like`."""

    def __call__(self, x: torch.Tensor) -> QuantizedTensor:
        """Quantize x [..., K] (float32, bfloat16 or float16) on the device where it lives.

        Returns:
            A quantized tensor with the shape, device and nominal dtype of x.
        """
        if x.dim() == 0:
            raise RecipeError("a tensor of at least one dimension is needed, not a scalar")
        with torch.no_grad():
            rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
            return self.wrap(self.quantize(rows, self.rowwise, self.columnwise), x)

    def to(self, device: torch.device) -> Quantizer:
        """The quantizer for tensors on `device`; itself where it holds no tensors."""
        return self


def check_fp8(dtype: torch.dtype) -> None:
    """Raise unless `dtype` is an FP8 format.

    Raises:
        RecipeError: names those that are.
    """
    if dtype not in MAX:
        raise RecipeError(f"dtype must be one of {', '.join(map(str, MAX))}, not {dtype}")
