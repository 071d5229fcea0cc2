"""Casting to FP8 with one scale a tensor, written out as a specification."""

import math

import torch

from quaver.formats import FLOAT32_MAX, MAX
from quaver.kernels.amax.reference import max_abs


def scale_from_amax(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """limit / amax in float32; 1 where amax is 0 or inf; the largest float32 where it overflows."""
    usable = torch.isfinite(amax) & (amax > 0)
    scale = divide(limit, torch.where(usable, amax, 1.0)).clamp(max=FLOAT32_MAX)
    return torch.where(usable, scale, 1.0)


def divide(numerator: float, tensor: torch.Tensor) -> torch.Tensor:
    """numerator / tensor, rounded once.

    `numerator / tensor` in torch is a reciprocal and a product, which round twice.
    """
    return torch.full_like(tensor, numerator) / tensor


def one_nan(data: torch.Tensor) -> torch.Tensor:
    """FP8 `data` with every NaN as the byte 0x7F, in place.

    A NaN's sign survives arithmetic on some machines and not on others.
    """
    payload = data.view(torch.uint8)
    payload.masked_fill_(payload == 0xFF, 0x7F)
    return data


def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = saturate(x * scale), rounded to nearest even; NaN becomes 0x7F, inf saturates.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        scale: float32, contiguous; its flat element `slot` multiplies x.
        amax: float32, contiguous; its flat element `slot` is raised to max|x|. None: not recorded.
        ready: float32; where its flat element `slot` is 0, the scale was never set, and the scale
            of x's own amax is taken for this call. None: the scale is set.
        slot: which element of the three.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        columnwise: also return the transposed payload.
        margin: the scale of x's own amax is divided by 2^margin.

    Returns:
        The payload [..., K] in `dtype`; the transposed payload [K, M], M the product of the leading
        dimensions (empty if not asked for); scale_inv = 1 / scale, float32 [1].
    """
    used = scale.view(-1)[slot]
    wide = x.to(torch.float32)
    if amax is not None or ready is not None:
        seen = max_abs(wide)
        if amax is not None:
            cell = amax.view(-1)[slot]
            cell.copy_(torch.maximum(cell, seen))
        if ready is not None:
            is_ready = ready.view(-1)[slot] > 0
            used = torch.where(is_ready, used, scale_from_amax(seen, MAX[dtype] * 2.0**-margin))
    limit = MAX[dtype]
    scaled = (wide * used).clamp_(-limit, limit)
    data = one_nan(scaled.to(dtype, memory_format=torch.contiguous_format))
    if columnwise:
        rows = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
        transposed = rows.t().clone(memory_format=torch.contiguous_format)
    else:
        transposed = data.new_empty(0)
    return data, transposed, divide(1.0, used).reshape(1)
