"""From an FP8 payload back to high precision, written out as a specification."""

import torch


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x = q * scale_inv, computed in float32, rounded once to `dtype`.

    Args:
        data: any shape and strides, an FP8 dtype.
        scale_inv: float32 [1].
        dtype: of the result, which has the shape and strides of `data`.
    """
    return data.to(torch.float32).mul_(scale_inv).to(dtype)
