"""The format E2M1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 as the codes 0 to 7, and a sign (8).

The magnitudes lie 0.5 apart below 2, 1 apart below 4, and 2 apart above. With 2^e the power of two
below a magnitude, e at least 0, it is `steps * 2^(e - 1)` and its code is `steps + 2 * e`.
"""

from typing import Final

import torch

E2M1_MAX: Final = 6.0
_EXPONENT = 0x7F800000  # the bits of a float32 that hold it


def encode(x: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """E2M1 codes; saturates, keeps the sign of zero, takes NaN as 0.

    Args:
        x: float32, any shape; overwritten.
        bits: int64 of x's shape, 32 random bits each: rounds away from zero with the probability
            that is the fraction of a step, to 24 bits. None: rounds to nearest even.

    Returns:
        uint8 of x's shape, each from 0 to 15.
    """
    magnitude = x.nan_to_num_(nan=0.0).abs().clamp_(max=E2M1_MAX)
    sign = x.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8)
    power = magnitude.clamp(min=1.0).view(torch.int32).bitwise_and_(_EXPONENT)
    steps = magnitude.div_(power.view(torch.float32)).mul_(2.0)
    if bits is None:
        steps = steps.round_()
    else:
        below = steps.floor()
        uniform = (bits >> 8).to(torch.float32).mul_(2.0**-24)
        steps = below + (uniform < steps - below)
    twice_exponent = power.bitwise_right_shift_(22).sub_(2 * 127)
    code = steps.to(torch.int32).add_(twice_exponent).bitwise_or_(sign)
    return code.to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The values of E2M1 codes.

    Args:
        codes: uint8, any shape, each from 0 to 15.

    Returns:
        float32 of the same shape.
    """
    code = codes.to(torch.int32)
    magnitude = code & 7
    exponent = ((magnitude >> 1) - 1).clamp_(min=0)
    step = ((exponent + 126) << 23).view(torch.float32)
    value = (magnitude - 2 * exponent) * step
    return torch.where(code > 7, -value, value)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C], contiguous, C even, to [R, C/2]: the even code goes to the low four bits.

    By pairs: the two bytes of a pair are the low and the high byte of an int16 (little-endian, as
    is every machine that torch runs on), which is several times faster than two strided reads.
    """
    pairs = codes.view(-1).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C] to [R, 2 * C], the inverse of `pack`."""
    pairs = data.to(torch.int16)
    return ((pairs & 15) | ((pairs & 0xF0) << 4)).view(torch.uint8)
