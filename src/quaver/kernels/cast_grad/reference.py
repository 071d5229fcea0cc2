"""Casting an output's gradient and summing it for the bias, written out as a specification."""

import torch

from quaver.kernels.cast.reference import cast


def cast_grad(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast` of a gradient, with its sums over the rows, which are the gradient of a bias.

    Args:
        x: [M, N], float32, bfloat16 or float16, any strides.
        scale, amax, ready, slot, dtype, columnwise, margin: as in `cast`.

    Returns:
        The payload [M, N], the transposed payload [N, M] (empty if not asked for) and scale_inv,
        bit for bit as of `cast`; the sums of x, not of its payload, float32 [N]. They are summed
        in float32 in an order that depends on nothing but shape and device: two runs agree.
    """
    sums = x.to(torch.float32).sum(0)
    return *cast(x, scale, amax, ready, slot, dtype, columnwise, margin), sums
