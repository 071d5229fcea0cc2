"""FP8 with one scale a tensor: given from outside, or from the tensor's own amax."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from quaver.errors import RecipeError
from quaver.kernels import amax as record_amax
from quaver.kernels import cast, current_cast
from quaver.kernels.scaled_mm.layouts import TENSOR
from quaver.quantizers.base import Draw, Quantizer, check_fp8
from quaver.tensors import Float8Tensor, Operand, Quantized


def _operands(
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rowwise: bool, columnwise: bool
) -> Quantized:
    data, transposed, scale_inv = results
    return Quantized(
        Operand(data, scale_inv, TENSOR) if rowwise else None,
        Operand(transposed, scale_inv, TENSOR) if columnwise else None,
    )


class PerTensorQuantizer(Quantizer):
    """A quantizer that gives Float8Tensors."""

    transposes_losslessly = True

    def wrap(self, quantized: Quantized, like: torch.Tensor) -> Float8Tensor:
        """The operands as a Float8Tensor with the shape and nominal dtype of `like`."""
        row, col = quantized
        scale_inv = (row or col).scale_inv  # type: ignore[union-attr]
        wrapped: Float8Tensor = Float8Tensor(
            None if row is None else row.data.view(like.shape),
            scale_inv,
            None if col is None else col.data,
            dtype=like.dtype,
            shape=like.shape,
            quantizer=self,
        )
        return wrapped


class Float8Quantizer(PerTensorQuantizer):
    """Quantizes with a scale it is given, and records the amax, as delayed scaling does.

    Args:
        scale: float32 [1]; multiplies before the cast.
        amax: float32 [1]; raised to max|x| at every call.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the payload in the tensor's own layout.
        columnwise: make the transposed payload.

    Called on x (float32, bfloat16 or float16) it gives a Float8Tensor on x's device.

    Raises:
        RecipeError: a dtype that is not FP8, no usage, or a scale or amax of the wrong form.
        DeviceMismatchError: on a call: x, scale and amax are not all on one device.
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
        super().__init__(rowwise, columnwise)
        check_fp8(dtype)
        for name, tensor in (("scale", scale), ("amax", amax)):
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise RecipeError(
                    f"{name} must be a float32 tensor of one element, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        self.scale = scale
        self.amax = amax
        self.dtype = dtype

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] with the scale that was given."""
        results = cast(x, self.scale, self.amax, None, 0, self.dtype, columnwise)
        return _operands(results, rowwise, columnwise)

    def to(self, device: torch.device) -> Float8Quantizer:
        """The same quantizer with its scale and amax on `device`."""
        return Float8Quantizer(
            self.scale.to(device),
            self.amax.to(device),
            self.dtype,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
        )


class Float8CurrentScalingQuantizer(PerTensorQuantizer):
    """Quantizes with the scale of the tensor's own amax: fp8_max / max(amax, amax_epsilon).

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the payload in the tensor's own layout.
        columnwise: make the transposed payload.
        power_2_scale: round the scale down to a power of two.
        amax_epsilon: the amax counts as at least this much.
        amax_reduction_group: MAX-reduce the amax over these ranks first; None: do not.

    Raises:
        RecipeError: a dtype that is not FP8, or no usage.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        power_2_scale: bool = False,
        amax_epsilon: float = 0.0,
        amax_reduction_group: Any = None,
    ) -> None:
        super().__init__(rowwise, columnwise)
        check_fp8(dtype)
        self.dtype = dtype
        self.power_2_scale = power_2_scale
        self.amax_epsilon = amax_epsilon
        self.amax_reduction_group = amax_reduction_group
        self.reduces_over_region = False

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] with the scale of its own amax, reduced first if asked for."""
        amax = None
        if self.amax_reduction_group is not None:
            amax = self._reduced(x, self.amax_reduction_group)
        elif self.reduces_over_region and dist.is_available() and dist.is_initialized():
            amax = self._reduced(x, group)
        results = current_cast(
            x, self.dtype, self.power_2_scale, self.amax_epsilon, amax, columnwise
        )
        return _operands(results, rowwise, columnwise)

    def _reduced(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        amax = torch.zeros(1, dtype=torch.float32, device=x.device)
        record_amax(x, amax, 0)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax
