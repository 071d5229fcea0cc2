"""The matrix product of two quantized operands, written out as a specification."""

import torch

from quaver.kernels.scaled_mm.layouts import TENSOR, operand_values


def scaled_mm(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    a: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    a_layout: str = TENSOR,
    b_layout: str = TENSOR,
    a_global_scale_inv: torch.Tensor | None = None,
    b_global_scale_inv: torch.Tensor | None = None,
    accurate: bool = True,
) -> torch.Tensor:
    """out = A @ B^T + bias, where A and B are what the operands stand for.

    Operands, product and bias are float32, rounded once to `dtype`: as where hardware multiplies
    FP8, whose products it sums in float32 before the scales and the bias.

    Args:
        a, a_scale_inv, a_layout, a_global_scale_inv: [M, K], as `layouts` says; any strides.
        b, b_scale_inv, b_layout, b_global_scale_inv: [N, K], likewise.
        bias: [N] or None.
        dtype: of the result [M, N].
        accurate: False allows hardware to sum less exactly and faster; here sums are always exact
            to float32.
    """
    left = operand_values(a, a_scale_inv, a_layout, a_global_scale_inv)
    right = operand_values(b, b_scale_inv, b_layout, b_global_scale_inv)
    width = min(left.shape[1], right.shape[1])  # FP4 fills an odd width up with a zero
    product = left[:, :width] @ right[:, :width].t()
    if bias is not None:
        # After the product: a sum that begins with the bias rounds otherwise. And not in place: a
        # policy of selective checkpointing may have kept the product.
        product = product + bias
    return product.to(dtype)
