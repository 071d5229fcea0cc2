"""Casting to FP8 with one scale that the tensor's own amax gives, as a specification."""

import torch

from quaver.formats import MAX
from quaver.kernels.amax.reference import max_abs
from quaver.kernels.cast.reference import divide, scale_from_amax
from quaver.kernels.current_cast.tiles import row_tiles, store_transposed


def current_scale(amax: torch.Tensor, limit: float, power_2: bool, epsilon: float) -> torch.Tensor:
    """limit / max(amax, epsilon) in float32, element by element.

    1 where that maximum is 0, inf or NaN; the largest float32 where the quotient overflows; with
    `power_2` then rounded down to a power of two. The result is positive and never subnormal.
    """
    scale = scale_from_amax(amax.clamp(min=epsilon), limit)
    return power_of_two_floor(scale) if power_2 else scale


def power_of_two_floor(scale: torch.Tensor) -> torch.Tensor:
    """The largest power of two up to each positive normal float32: its mantissa bits cleared."""
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def saturate_(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x float32 held within +-limit, in place; every NaN becomes the same one.

    Processors differ in the sign and the low bits of a NaN that went through a product, and the
    FP8 cast keeps some of them: without this the payloads would differ, too.
    """
    return x.clamp_(-limit, limit).nan_to_num_(nan=torch.nan)


def tiled_max_abs(x: torch.Tensor) -> torch.Tensor:
    """`max_abs` of x [M, K], in float32, whose maxima are vectorized where bfloat16's are not."""
    return torch.stack([max_abs(x[tile].to(torch.float32)) for tile in row_tiles(x)]).amax()


def current_cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
    amax: torch.Tensor | None,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = saturate(x * scale), rounded to nearest even; NaN stays NaN (positive), inf saturates.

    scale = `current_scale(amax, the largest value of dtype, power_2, epsilon)`.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_2: round the scale down to a power of two.
        epsilon: the amax counts as at least this much.
        amax: float32 [1], max|x| after a reduction over other ranks. None: that of x alone, which
            passes over NaN.
        columnwise: also return the transposed payload.

    Returns:
        The payload [M, K] in `dtype`; the transposed payload [K, M] (empty if not asked for);
        scale_inv = 1 / scale, float32 [1].
    """
    limit = MAX[dtype]
    known = tiled_max_abs(x).reshape(1) if amax is None else amax
    scale = current_scale(known, limit, power_2, epsilon)
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    transposed = data.new_empty((x.shape[1], x.shape[0]) if columnwise else (0,))
    for tile in row_tiles(x):
        data[tile] = saturate_(x[tile].to(torch.float32) * scale, limit)
        if columnwise:
            store_transposed(data[tile], transposed, tile)
    return data, transposed, divide(1.0, scale)
