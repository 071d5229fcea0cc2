"""Casting to MXFP8: FP8 with an E8M0 scale for each 32 values, as a specification.

Source: OCP Microscaling Formats (MX) Specification 1.0: the element formats, the block size and
E8M0. How a scale is chosen is left open there: here it is rounded up, so that nothing saturates.
"""

import torch

from quaver.formats import MAX
from quaver.kernels.block_cast.blocks import Block, Results, cast_usages, dequantize_blocks

BLOCK: Block = (1, 32)

_BIAS = 127
_LARGEST = 0xFE
_NAN = 0xFF
_MANTISSA = 23
_SMALLEST = 0x400000
"""The bits of 2^-127 in float32, where it is subnormal: its power is in the mantissa."""


def e8m0_bytes(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """The E8M0 byte, as int32, of amax / limit (float32) rounded up to a power of two.

    Up to 2^-127 that is 0; inf gives 0xFE; NaN's 0xFF never comes out.
    """
    bits = (amax / torch.full_like(amax, limit)).view(torch.int32)
    # A carry out of the mantissa raises the exponent; subnormals carry into 1, but only those
    # above 2^-127 may: the difference holds the others at 0, and is the larger one elsewhere.
    carried = bits.add((1 << _MANTISSA) - 1).bitwise_right_shift_(_MANTISSA)
    return torch.minimum(carried, bits.sub_(_SMALLEST)).clamp_(0, _LARGEST)


def power_of_two(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in float32, of E8M0 bytes in int32 that are not NaN."""
    return (byte << _MANTISSA).clamp_(min=_SMALLEST).view(torch.float32)


def mx_cast(x: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Results:
    """q = saturate(x / scale), rounded to nearest even; NaN stays NaN (positive), inf saturates.

    scale = the power of two next above, or equal to, amax / (the largest value of dtype), within
    E8M0. The amax passes over NaN; where it is inf, the scale is 2^127. The last block of a row or
    a column may be short. The column-wise results are the row-wise ones of x's transpose.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: whether the row-wise results are wanted.
        columnwise: whether the column-wise results are wanted.

    Returns:
        Payload [M, K] in `dtype`; scales, torch.float8_e8m0fnu [M, ceil(K / 32)]; column-wise
        payload [K, M]; its scales [K, ceil(M / 32)]. All contiguous; empty where not asked for.
    """

    def rule(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        byte = e8m0_bytes(amax, MAX[dtype])
        return power_of_two(2 * _BIAS - byte), byte.to(torch.uint8)

    row, row_scale, col, col_scale = cast_usages(
        x, dtype, BLOCK, rule, torch.uint8, (rowwise, columnwise)
    )
    return row, row_scale.view(torch.float8_e8m0fnu), col, col_scale.view(torch.float8_e8m0fnu)


def mx_dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x = q * scale_inv, computed in float32, rounded once to `dtype`.

    Args:
        data: [M, K], an FP8 dtype, any strides. Column-wise results give the transpose of x.
        scale_inv: torch.float8_e8m0fnu [M, ceil(K / 32)]; 0xFF makes its block NaN.
        dtype: of the result [M, K], which is contiguous.
    """
    byte = scale_inv.view(torch.uint8).to(torch.int32)
    scale = torch.where(byte == _NAN, torch.nan, power_of_two(byte))
    return dequantize_blocks(data, scale, BLOCK, dtype)
