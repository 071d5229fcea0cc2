"""FP8 with one scale a tensor that is given from outside."""

from __future__ import annotations

import torch

from quaver.errors import RecipeError
from quaver.formats import MAX
from quaver.kernels import cast
from quaver.tensors import Float8Tensor


class Float8Quantizer:
    """Quantizes with a scale it is given, and records the amax, as delayed scaling does.

    Args:
        scale: float32 [1]; multiplies before the cast.
        amax: float32 [1]; raised to max|x| at every call.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the payload in the tensor's own layout.
        columnwise: make the transposed payload.

    Raises:
        RecipeError: a dtype that is not FP8, no usage, or a scale or amax of the wrong form.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        if dtype not in MAX:
            raise RecipeError(f"dtype must be one of {', '.join(map(str, MAX))}, not {dtype}")
        if not (rowwise or columnwise):
            raise RecipeError("at least one of rowwise and columnwise must be True")
        for name, tensor in (("scale", scale), ("amax", amax)):
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise RecipeError(
                    f"{name} must be a float32 tensor of one element, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        self.scale = scale
        self.amax = amax
        self.dtype = dtype
        self.rowwise = rowwise
        self.columnwise = columnwise

    def to(self, device: torch.device) -> Float8Quantizer:
        """The same quantizer with its scale and amax on `device`."""
        return Float8Quantizer(
            self.scale.to(device),
            self.amax.to(device),
            self.dtype,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
        )

    def __call__(self, x: torch.Tensor) -> Float8Tensor:
        """Quantize x [..., K] (float32, bfloat16 or float16) on the device where it lives.

        Returns:
            A Float8Tensor with the shape, device and nominal dtype of x.

        Raises:
            DeviceMismatchError: x, scale and amax are not all on one device.
        """
        with torch.no_grad():
            data, transposed, scale_inv = cast(
                x.detach(), self.scale, self.amax, None, 0, self.dtype, self.columnwise
            )
        return Float8Tensor(
            data if self.rowwise else None,
            scale_inv,
            transposed if self.columnwise else None,
            dtype=x.dtype,
            shape=x.shape,
            quantizer=self,
        )
