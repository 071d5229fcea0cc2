"""NVFP4's arithmetic inside Triton kernels: E2M1, block scales, and random bits."""

import triton
import triton.language as tl

from quaver.kernels.common.triton_numbers import LARGEST, fp8_bytes, fp8_values, reciprocal

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_EXPONENT = tl.constexpr(0x7F800000)
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: once it is added to a small number, the last bits are that number as an integer."""
_TO_INTEGER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def words_to_int64(low, high):
    """The int64 of two words, each given as an int32 of the same bits."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _low(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _high(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox_words(group, seed, offset, stream: tl.constexpr):
    """Philox 4x32-10, four words for each group, as the reference `random_bits` counts them.

    group, seed and offset are int64; the words are uint32 of group's shape.
    """
    c0, c1 = _low(group), _high(group) + (stream << 30)
    c2 = tl.zeros_like(c0) + _low(offset)
    c3 = tl.zeros_like(c0) + _high(offset)
    k0, k1 = _low(seed), _high(seed)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def block_scale(amax, scale, scale_inv, NATIVE: tl.constexpr):
    """Of blocks' amaxes, float32, NaN included: the E4M3 byte, and what multiplies before the cast.

    scale and scale_inv are the global ones.
    """
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)) * scale
    byte = fp8_bytes(wanted, False, NATIVE)
    encode = reciprocal(fp8_values(byte, False, NATIVE) * scale_inv)
    return byte, tl.where(encode > LARGEST, LARGEST, encode)


@triton.jit
def block_amax_or_nan(x, axis: tl.constexpr):
    """max|x| of float32 x along `axis`, NaN where there is a NaN: a maximum of bits."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(x, uniform, STOCHASTIC: tl.constexpr):
    """E2M1 codes, int32: saturated, the sign of zero kept, NaN as 0.

    Rounded to nearest even, or, STOCHASTIC, away from zero where `uniform` (float32 in [0, 1)) is
    less than the fraction of a step.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & _MAGNITUDE) > _INFINITY, 0, bits)
    held = tl.minimum((bits & _MAGNITUDE).to(tl.float32, bitcast=True), 6.0)
    power = tl.maximum(held, 1.0).to(tl.int32, bitcast=True) & _EXPONENT
    twice_inverse = ((255 << 23) - power).to(tl.float32, bitcast=True)
    steps = held * twice_inverse  # exact, by a power of two
    if STOCHASTIC:
        below = tl.floor(steps)
        code = below.to(tl.int32) + (uniform < steps - below).to(tl.int32)
    else:
        code = (steps + _TO_INTEGER).to(tl.int32, bitcast=True) - _TO_INTEGER_BITS
    return (code + ((power >> 22) - 254)) | ((bits >> 28) & 8)


@triton.jit
def e2m1_values(code):
    """The float32 values of E2M1 codes, int32."""
    size = code & 7
    exponent = tl.maximum((size >> 1) - 1, 0)
    step = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    value = (size - 2 * exponent).to(tl.float32) * step
    return tl.where(code > 7, -value, value)
