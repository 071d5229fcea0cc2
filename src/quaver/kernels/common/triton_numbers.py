"""FP8 rounding and scale arithmetic inside Triton kernels, bit for bit as the references have it.

`/` is an approximate division in Triton, hence `div_rn`; powers of two are made of exponent bits.
The cast of FP8 hardware rounds as wanted; elsewhere, and in the interpreter, integers do it.
"""

import triton
import triton.language as tl

from quaver.formats import FLOAT32_MAX

LARGEST = tl.constexpr(FLOAT32_MAX)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_EXPONENT = tl.constexpr(-0x800000)
_MANTISSA_BITS = tl.constexpr(23)
_ALL_MANTISSA = tl.constexpr(0x7FFFFF)
_NAN_BYTE = tl.constexpr(0x7F)
_E8M0_LARGEST = tl.constexpr(0xFE)
_E8M0_SMALLEST = tl.constexpr(0x400000)
"""The bits of 2^-127 in float32, where it is subnormal: its power is in the mantissa."""


# Triton's own conversion leaves pairs of bytes in 16-bit registers. Where a pair is both stored
# with its neighbour and taken apart, as for a transpose, ptxas (of Triton 3.6, for sm_90) merges
# the two pairs and then reads a register that nothing has written. Four at a time it cannot.
_FOUR = """
{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}.f32 low, $2, $1;
cvt.rn.satfinite.{0}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}
"""
_TO_E4M3 = tl.constexpr(_FOUR.format("e4m3x2"))
_TO_E5M2 = tl.constexpr(_FOUR.format("e5m2x2"))


@triton.jit
def fp8_bytes(x, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The FP8 bytes, uint8, of x (float32): to nearest even, saturated, every NaN 0x7F.

    E5M2 says which format, E4M3 otherwise. NATIVE: the device converts (capability 8.9 and later).
    """
    if not NATIVE:
        coded = _rounded_bytes(x, E5M2)
    elif E5M2:
        coded = tl.inline_asm_elementwise(
            _TO_E5M2, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        coded = tl.inline_asm_elementwise(
            _TO_E4M3, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    return coded


@triton.jit
def _rounded_bytes(x, E5M2: tl.constexpr):
    """`fp8_bytes` by integer arithmetic.

    A subnormal result comes from a float addition: its sum's last bit is worth the format's
    smallest value, so that the addition rounds to nearest even there.
    """
    dropped: tl.constexpr = 21 if E5M2 else 20
    bias: tl.constexpr = 15 if E5M2 else 7
    largest: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # 57344 and 448
    smallest_normal: tl.constexpr = (128 - bias) << 23
    aligned: tl.constexpr = (127 - bias + dropped + 1) << 23
    rebias: tl.constexpr = (127 - bias) << 23
    below_half: tl.constexpr = (1 << (dropped - 1)) - 1
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    held = tl.minimum(magnitude, largest)
    odd = (held >> dropped) & 1
    normal = (held - rebias + below_half + odd) >> dropped
    shift = tl.full(held.shape, aligned, tl.int32).to(tl.float32, bitcast=True)
    added = held.to(tl.float32, bitcast=True) + shift
    subnormal = added.to(tl.int32, bitcast=True) - aligned
    rounded = tl.where(held < smallest_normal, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > _INFINITY, _NAN_BYTE, rounded).to(tl.uint8)


@triton.jit
def fp8_values(byte, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The float32 values of FP8 bytes, uint8; arguments as of `fp8_bytes`."""
    if E5M2:  # the upper half of a float16
        value = (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = _e4m3_values(byte)
    return value


@triton.jit
def _e4m3_values(byte):
    """`fp8_values` of E4M3 by integer arithmetic."""
    held = byte.to(tl.int32)
    magnitude = held & 0x7F
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # times 2^-9
    bits = tl.where(magnitude < 8, subnormal, (magnitude << 20) + (120 << 23))
    bits = tl.where(magnitude == _NAN_BYTE, 0x7FC00000, bits)
    return (bits | ((held & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """x in float32. The interpreter's own conversion gets bfloat16's subnormals wrong."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def narrowed(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """x (float32) in DTYPE, to nearest even; the interpreter's own conversion cuts bfloat16 off."""
    if tl.bfloat16 == DTYPE and not NATIVE:
        bits = x.to(tl.int32, bitcast=True)
        coded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        coded = tl.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, coded)
        narrow = coded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(DTYPE)
    return narrow


@triton.jit
def magnitude(x):
    """|x| of float32 x, with 0 for NaN."""
    return tl.maximum(tl.abs(x), 0.0)


@triton.jit
def block_amax(x, axis: tl.constexpr):
    """max|x| of float32 x along `axis` (None: of all of it): NaN is passed over, inf counts."""
    return tl.max(magnitude(x), axis)


@triton.jit
def raise_cell(cell, amax):
    """Raise the float32 at the pointer `cell` to the scalar amax >= 0, atomically.

    Floats that are not negative order as their bits do, and a maximum does not depend on the order.
    """
    bits = amax.to(tl.int32, bitcast=True)
    tl.atomic_max(cell.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def scale_from_amax(amax, limit):
    """limit / amax in float32; 1 where amax is 0, inf or NaN; the largest float32 on overflow."""
    usable = (amax > 0.0) & (amax <= LARGEST)
    divisor = tl.where(usable, amax, 1.0)
    quotient = tl.div_rn(tl.full(divisor.shape, limit, tl.float32), divisor)
    return tl.where(usable, tl.minimum(quotient, LARGEST), 1.0)


@triton.jit
def current_scale(amax, limit, epsilon, POWER_2: tl.constexpr):
    """`scale_from_amax` of max(amax, epsilon); POWER_2: rounded down to a power of two."""
    scale = scale_from_amax(tl.where(amax < epsilon, epsilon, amax), limit)
    if POWER_2:
        scale = power_of_two_floor(scale)
    return scale


@triton.jit
def power_of_two_floor(scale):
    """The largest power of two up to each positive normal float32: its mantissa bits cleared."""
    return (scale.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x of float32 x, rounded once."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def e8m0_bytes(amax, limit):
    """The E8M0 byte, as int32, of amax / limit (float32) rounded up to a power of two.

    Up to 2^-127 that is 0; inf gives 0xFE; NaN's 0xFF never comes out.
    """
    quotient = tl.div_rn(amax, tl.full(amax.shape, limit, tl.float32))
    bits = quotient.to(tl.int32, bitcast=True)
    # A carry out of the mantissa raises the exponent; above 2^-127 subnormals, too, carry into 1.
    carried = tl.minimum((bits + _ALL_MANTISSA) >> _MANTISSA_BITS, _E8M0_LARGEST)
    return tl.where(bits <= _E8M0_SMALLEST, 0, carried)


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) in float32, of E8M0 bytes in int32 that are not NaN."""
    bits = tl.maximum(byte << _MANTISSA_BITS, _E8M0_SMALLEST)
    return bits.to(tl.float32, bitcast=True)
