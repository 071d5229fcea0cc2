"""The matrix product of two FP8 operands, written out as a specification."""

import torch

from quaver.kernels.dequantize.reference import dequantize


def scaled_mm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out = (a * a_scale_inv) @ (b * b_scale_inv)^T + bias.

    Operands, product and bias are float32, rounded once to `dtype`: as where hardware multiplies
    FP8, whose products it sums in float32 before the scales and the bias.

    Args:
        a: [M, K], an FP8 dtype, any strides; `a_scale_inv` float32 [1].
        b: [N, K], likewise.
        bias: [N] or None.
        dtype: of the result [M, N].
    """
    left = dequantize(a, a_scale_inv, torch.float32)
    right = dequantize(b, b_scale_inv, torch.float32)
    product = left @ right.t()
    if bias is not None:
        product.add_(bias)  # after the product: a sum that begins with the bias rounds otherwise
    return product.to(dtype)
