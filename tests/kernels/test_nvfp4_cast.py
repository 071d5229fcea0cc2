"""The cast to NVFP4 and back, bit for bit against NumPy and ml_dtypes."""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver.kernels.nvfp4_cast.op import nvfp4_cast, nvfp4_dequantize
from tests.kernels import numerics
from tests.kernels.test_random_bits import bits_in_numpy
from tests.samples import DTYPES, NAMES, normal, sample

VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])

inputs = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_shapes = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1x16", "16x16"])


class Quantized(NamedTuple):
    row_data: torch.Tensor
    row_scale: torch.Tensor
    col_data: torch.Tensor
    col_scale: torch.Tensor
    scale_inv: torch.Tensor


def quantize(x, two_dimensional=False, *, stochastic=False, seed=0, offset=0) -> Quantized:
    return Quantized(*nvfp4_cast(x, two_dimensional, stochastic, seed, offset, True, True))


def dequantize(data, scale, scale_inv, columns, two_dimensional=False, dtype=torch.float32):
    return nvfp4_dequantize(data, scale, scale_inv, two_dimensional, columns, dtype)


def back(x, two_dimensional=False, **options) -> torch.Tensor:
    q = quantize(x, two_dimensional, **options)
    return dequantize(q.row_data, q.row_scale, q.scale_inv, x.shape[1], two_dimensional)


def codes_of(data: torch.Tensor, columns: int) -> np.ndarray:
    bits = data.cpu().numpy()
    return np.stack([bits & 15, bits >> 4], axis=2).reshape(len(bits), 2 * bits.shape[1])[
        :, :columns
    ]


def flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def padded(x: np.ndarray, height: int) -> np.ndarray:
    whole = np.zeros((-(-x.shape[0] // height) * height, -(-x.shape[1] // 16) * 16), x.dtype)
    whole[: x.shape[0], : x.shape[1]] = x
    return whole


def scaled(x: np.ndarray, two_dimensional: bool) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """What is rounded to E2M1, the bytes of the block scales, and the inverse of the global one."""
    magnitudes = np.abs(x)
    counted = magnitudes[~np.isnan(magnitudes)]
    amax = counted.max() if counted.size else np.float32(0)
    scale = numerics.scale_of(amax, 2688)
    scale_inv = np.float32(1) / scale
    height = 16 if two_dimensional else 1
    whole = padded(x, height)
    shape = (whole.shape[0] // height, height, whole.shape[1] // 16, 16)
    blocks = whole.reshape(shape).transpose(0, 2, 1, 3).reshape(shape[0], shape[2], height * 16)
    with np.errstate(all="ignore"):
        largest = np.abs(blocks).max(axis=2)  # NaN if there is one
        wanted = np.clip(largest / np.float32(6) * scale, 0, 448)
        bytes_ = wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        bytes_ = np.where(np.isnan(wanted), np.uint8(0x7F), bytes_)
        stored = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = np.minimum(np.float32(1) / (stored * scale_inv), numerics.FLOAT32_MAX)
        factor = factor.repeat(height, axis=0).repeat(16, axis=1)
        held = np.clip(x * factor[: x.shape[0], : x.shape[1]], -6, 6)
    return np.where(np.isnan(held), np.float32(0), held), bytes_, scale_inv


def to_even(x: np.ndarray, two_dimensional: bool) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes, bytes of the block scales, inverse of the global scale."""
    held, scales, scale_inv = scaled(x, two_dimensional)
    return held.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), scales, scale_inv


def at_random(held: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Codes of `held`, the upper neighbour where the 24 upper bits are below the fraction."""
    magnitudes = np.abs(held).astype(np.float64)
    below = np.searchsorted(VALUES, magnitudes, side="right") - 1
    above = np.minimum(below + 1, 7)
    fraction = (magnitudes - VALUES[below]) / np.where(
        above > below, VALUES[above] - VALUES[below], 1
    )
    code = np.where((bits >> 8) / 2**24 < fraction, above, below)
    return (code + 8 * np.signbit(held)).astype(np.uint8)


def assert_quantized(data, scale, codes, scales) -> None:
    assert data.dtype == torch.uint8
    assert scale.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    assert scale.is_contiguous()
    assert data.shape == (len(codes), (codes.shape[1] + 1) // 2)
    np.testing.assert_array_equal(codes_of(data, codes.shape[1]), codes)
    if codes.shape[1] % 2:
        assert not (data[:, -1] >> 4).any()
    np.testing.assert_array_equal(numerics.payload_bits(scale), scales)


@both_shapes
@inputs
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_cast_bit_for_bit(name: str, dtype, two_dimensional: bool) -> None:
    x = flat(sample(name, dtype))
    q = quantize(x, two_dimensional)
    values = numerics.to_float32(x)
    codes, scales, scale_inv = to_even(values, two_dimensional)
    assert_quantized(q.row_data, q.row_scale, codes, scales)
    codes, scales, _ = to_even(np.ascontiguousarray(values.T), two_dimensional)
    assert_quantized(q.col_data, q.col_scale, codes, scales)
    assert q.scale_inv.shape == (1,)
    assert q.scale_inv.numpy() == scale_inv


@both_shapes
@pytest.mark.parametrize("shape", [(130, 50), (64, 33), (65, 16), (200, 7)])
def test_shapes_of_more_than_one_tile(shape: tuple[int, int], two_dimensional: bool) -> None:
    x = (
        normal(*shape, dtype=torch.bfloat16, name="tiles")
        * torch.linspace(-8, 8, shape[0]).exp2()[:, None]
    )
    values = numerics.to_float32(x)
    q = quantize(x, two_dimensional)
    assert_quantized(q.row_data, q.row_scale, *to_even(values, two_dimensional)[:2])
    turned = np.ascontiguousarray(values.T)
    assert_quantized(q.col_data, q.col_scale, *to_even(turned, two_dimensional)[:2])


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_input_is_cast_bit_for_bit(source) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    x = x.reshape(16, -1).t()  # 16 magnitudes far apart in a block
    for y in (x, x.reshape(-1, 16)):
        q = quantize(y)
        codes, scales, _ = to_even(numerics.to_float32(y), False)
        assert_quantized(q.row_data, q.row_scale, codes, scales)


def one_scale(rows: np.ndarray) -> torch.Tensor:
    """`rows`, of 15 values below 6, as blocks that have the scale 1 exactly under a global scale 1.

    The last value of a row becomes 6; an element of the first row, 2688, makes the global scale 1.
    """
    x = np.concatenate([rows, np.full((len(rows), 1), 6, np.float32)], axis=1)
    top = np.zeros((1, 16), np.float32)
    top[0, 0] = 2688
    return torch.from_numpy(np.concatenate([top, x]).astype(np.float32))


def test_all_codes_ties_and_neighbours_of_ties() -> None:
    middles = (VALUES[:-1] + VALUES[1:]) / 2
    down, up = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9))
    low, high = np.arange(7), np.arange(1, 8)
    even = np.where(low % 2 == 0, low, high)
    rows = np.zeros((8, 15), np.float32)
    wanted = np.zeros((8, 15), np.int64)
    for i, (points, codes) in enumerate(
        [(VALUES[:7], low), (middles, even), (down, low), (up, high)]
    ):
        rows[2 * i, :7], wanted[2 * i, :7] = points, codes
        rows[2 * i + 1, :7], wanted[2 * i + 1, :7] = -points, codes + 8
    x = one_scale(rows)
    q = quantize(x)
    assert q.scale_inv.item() == 1
    assert q.row_scale.float()[1:].flatten().tolist() == [1.0] * 8
    assert codes_of(q.row_data, 16)[1:, :15].tolist() == wanted.tolist()
    assert (codes_of(q.row_data, 16)[1:, 15] == 7).all()
    restored = dequantize(q.row_data, q.row_scale, q.scale_inv, 16)
    assert restored[1, :7].tolist() == VALUES[:7].tolist()
    assert restored[2, :7].tolist() == (-VALUES[:7]).tolist()
    assert torch.signbit(restored[2, 0])
    assert restored[1, 15] == 6
    assert restored[0].tolist() == [2688.0] + [0.0] * 15


def test_all_pairs_of_codes_are_dequantized() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(2, 1)
    scale = torch.linspace(0.1, 400, 64).view(2, 32).to(torch.float8_e4m3fn)
    scale_inv = torch.tensor([0.3])
    values = data.numpy()
    both = np.stack([values & 15, values >> 4], axis=2).reshape(2, 512)
    expected = both.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = expected * scale.float().numpy().repeat(16, axis=1) * np.float32(0.3)
    for columns in (512, 511, 497):
        cut = data[:, : (columns + 1) // 2]
        got = dequantize(cut, scale, scale_inv, columns)
        np.testing.assert_array_equal(
            got.numpy().view(np.int32), expected[:, :columns].view(np.int32)
        )
    half = dequantize(data, scale, scale_inv, 512, dtype=torch.bfloat16)
    assert torch.equal(half, torch.from_numpy(expected).bfloat16())
    blocks = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn)
    square = dequantize(data.view(32, 16)[:17], blocks, scale_inv, 31, two_dimensional=True)
    unscaled = both.reshape(32, 32)[:17, :31].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    factor = np.float32([[1, 2], [4, 8]]).repeat(16, axis=0).repeat(16, axis=1)[:17, :31]
    np.testing.assert_array_equal(square.numpy(), unscaled * factor * np.float32(0.3))


def test_block_scales_at_the_ends_of_e4m3() -> None:
    """Block maxima that are multiples of 6 * 2^-9, E4M3's smallest number, ties included."""
    multiples = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.5, 7.0, 7.5, 8.0, 8.5]
    x = torch.zeros(len(multiples) + 1, 16)
    x[0, 0] = 2688.0
    x[1:, 0] = torch.tensor(multiples) * 6 * 2**-9
    x[1:, 1] = x[1:, 0] / -6
    q = quantize(x)
    assert q.scale_inv.item() == 1
    steps = (q.row_scale.float().flatten() * 2**9).tolist()
    assert steps == [448.0 * 512, 0, 0, 1, 1, 2, 2, 2, 4, 7, 8, 8, 8]
    restored = dequantize(q.row_data, q.row_scale, q.scale_inv, 16)
    assert not restored[1:3].any()  # lost under the tensor's largest value
    assert (restored[4, :2] * 2**9).tolist() == [6.0, -1.0]
    codes, scales, _ = to_even(x.numpy(), False)
    assert_quantized(q.row_data, q.row_scale, codes, scales)


def test_zero_infinity_and_the_ends_of_float32() -> None:
    zero = quantize(torch.zeros(3, 20))
    assert zero.scale_inv.item() == 1
    assert not zero.row_data.any()
    assert not zero.row_scale.float().any()
    x = torch.tensor([[torch.inf, -torch.inf, 3.0, -2.0], [2.0, -3.0, 0.0, 1.0]])
    q = quantize(x)
    assert q.scale_inv.item() == 1
    restored = dequantize(q.row_data, q.row_scale, q.scale_inv, 4)
    assert restored.tolist() == [[2688.0, -2688.0, 0.0, 0.0], [2.0, -3.0, 0.0, 1.0]]
    tiny = torch.tensor([[1e-42, -2e-42, 0.0]])
    q = quantize(tiny)
    assert q.scale_inv.item() == (torch.ones(()) / torch.finfo(torch.float32).max).item()
    assert codes_of(q.row_data, 3).tolist() == to_even(tiny.numpy(), False)[0].tolist()
    huge = torch.full((2, 5), torch.finfo(torch.float32).max)
    torch.testing.assert_close(back(huge), huge, rtol=1e-6, atol=0)


@both_shapes
@inputs
def test_nan_is_not_masked_and_does_not_leave_its_block(dtype, two_dimensional: bool) -> None:
    x = normal(40, 40, dtype=dtype, name="nan")
    clean = quantize(x, two_dimensional)
    spoilt = x.clone()
    spoilt[20, 17] = torch.nan
    spoilt[20, 18] = -torch.nan
    q = quantize(spoilt, two_dimensional)
    assert torch.equal(q.scale_inv, clean.scale_inv)
    restored = dequantize(q.row_data, q.row_scale, q.scale_inv, 40, two_dimensional)
    rows = slice(16, 32) if two_dimensional else slice(20, 21)
    assert restored[rows, 16:32].isnan().all()
    assert not codes_of(q.row_data, 40)[rows, 16:32].any()
    restored[rows, 16:32] = back(x, two_dimensional)[rows, 16:32]
    assert torch.equal(restored, back(x, two_dimensional))
    turned = dequantize(q.col_data, q.col_scale, q.scale_inv, 40, two_dimensional).t()
    columns = slice(16, 32) if two_dimensional else slice(17, 19)
    assert turned[16:32, columns].isnan().all()
    assert turned.isnan().sum() == (256 if two_dimensional else 32)


@both_shapes
def test_usages_that_are_not_asked_for_are_empty_and_change_nothing(two_dimensional: bool) -> None:
    x = normal(20, 35, name="usages")
    for stochastic in (False, True):
        whole = nvfp4_cast(x, two_dimensional, stochastic, 1, 2, True, True)
        row = nvfp4_cast(x, two_dimensional, stochastic, 1, 2, True, False)
        col = nvfp4_cast(x, two_dimensional, stochastic, 1, 2, False, True)
        for empty, like in [(row[2], whole[2]), (row[3], whole[3]), (col[0], whole[0])]:
            assert empty.shape == (0,)
            assert empty.dtype == like.dtype
        mixed = (*row[:2], *col[2:])
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(mixed, whole, strict=True))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@both_shapes
@inputs
@pytest.mark.parametrize("shape", [(150, 37), (33, 64), (1, 1), (70, 3)])
@pytest.mark.parametrize(("seed", "offset"), [(5, 0), (-7, 2**40 + 1)])
def test_stochastic_rounding_bit_for_bit(shape, dtype, two_dimensional, seed, offset) -> None:
    x = normal(*shape, dtype=dtype, name="random")
    x[0, 0] = torch.inf if shape[1] == 3 else x[0, 0]
    values = numerics.to_float32(x)
    q = quantize(x, two_dimensional, stochastic=True, seed=seed, offset=offset)
    nearest = quantize(x, two_dimensional)
    assert torch.equal(bytes_of(q.row_scale), bytes_of(nearest.row_scale))
    index = np.arange(values.size)
    row, col = (bits_in_numpy(index, seed, offset, stream).reshape(shape) for stream in (0, 1))
    held, scales, _ = scaled(values, two_dimensional)
    assert_quantized(q.row_data, q.row_scale, at_random(held, row), scales)
    held, scales, _ = scaled(np.ascontiguousarray(values.T), two_dimensional)
    assert_quantized(q.col_data, q.col_scale, at_random(held, col.T), scales)


FRACTIONS = [(0.1, 0, 0.5), (0.25, 0, 0.5), (0.7, 0.5, 1), (1.3, 1, 1.5), (2.2, 2, 3)]
FRACTIONS += [(3.5, 3, 4), (4.5, 4, 6), (5.9, 4, 6), (0.004, 0, 0.5), (-1.1, -1, -1.5)]


@pytest.mark.parametrize(("value", "near", "far"), FRACTIONS)
def test_stochastic_rounding_has_no_bias(value: float, near: float, far: float) -> None:
    """The number of values rounded away from zero is binomial: within 5 standard deviations."""
    x = one_scale(np.full((4000, 15), value, np.float32))
    restored = back(x, stochastic=True, seed=int(value * 1000), offset=3)[1:, :15]
    assert set(restored.unique().tolist()) == {near, far}
    fraction, draws = (value - near) / (far - near), restored.numel()
    ups = int((restored == far).sum())
    assert abs(ups - draws * fraction) < 5 * math.sqrt(draws * fraction * (1 - fraction))


def test_what_lies_on_a_value_is_not_moved_at_random() -> None:
    rows = np.tile(np.concatenate([VALUES, -VALUES[:7]]), (500, 1))
    x = one_scale(rows)
    assert torch.equal(back(x, stochastic=True, seed=1), x)


def test_rows_and_columns_seeds_and_offsets_draw_independently() -> None:
    """Halfway values: two independent draws agree half of the time."""
    x = torch.full((256, 256), 2.5)
    x[::16, ::16] = 6.0

    def ups(q: Quantized, *, columnwise: bool = False) -> torch.Tensor:
        data, scale = (q.col_data, q.col_scale) if columnwise else (q.row_data, q.row_scale)
        y = dequantize(data, scale, q.scale_inv, 256, two_dimensional=True)
        return (y.t() if columnwise else y)[x == 2.5] > 2.5

    first = quantize(x, True, stochastic=True, seed=1, offset=1)
    draws = [ups(first), ups(first, columnwise=True)]
    draws += [
        ups(quantize(x, True, stochastic=True, seed=s, offset=o)) for s, o in [(2, 1), (1, 2)]
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            agreeing, n = int((a == b).sum()), a.numel()
            assert abs(agreeing - n / 2) < 5 * math.sqrt(n) / 2
    again = quantize(x, True, stochastic=True, seed=1, offset=1)
    assert torch.equal(ups(again), draws[0])


tensors = st.builds(
    lambda rows, columns, seed, spread: torch.from_numpy(
        (
            np.random.default_rng(seed).standard_normal((rows, columns))
            * np.exp2(np.random.default_rng(seed + 1).uniform(-spread, 0, (rows, columns)))
        ).astype(np.float32)
    ),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 3, 12, 40]),
)
properties = settings(deadline=None, max_examples=60, derandomize=True)


@properties
@given(x=tensors, two_dimensional=st.booleans(), stochastic=st.booleans())
def test_an_element_moves_by_half_a_step_at_most(x, two_dimensional, stochastic) -> None:
    """By a whole step if rounded at random; what lies above 6 units of its block becomes 6."""
    q = quantize(x, two_dimensional, stochastic=stochastic, seed=3)
    y = dequantize(q.row_data, q.row_scale, q.scale_inv, x.shape[1], two_dimensional)
    height = 16 if two_dimensional else 1
    unit = q.row_scale.double().repeat_interleave(height, 0).repeat_interleave(16, 1)
    unit = unit[: x.shape[0], : x.shape[1]] * q.scale_inv.double()
    held = torch.minimum(x.double().abs(), 6 * unit)
    step = torch.where(held < 2 * unit, 0.5, torch.where(held < 4 * unit, 1.0, 2.0)) * unit
    error = (y.double().abs() - held).abs()
    assert (error <= step * (1 if stochastic else 0.5) + 1e-6 * unit).all()
    assert (y * x >= 0).all()


@properties
@given(x=tensors, two_dimensional=st.booleans())
def test_columnwise_is_rowwise_of_the_transpose(x, two_dimensional) -> None:
    q, turned = quantize(x, two_dimensional), quantize(x.t(), two_dimensional)
    assert torch.equal(q.col_data, turned.row_data)
    assert torch.equal(bytes_of(q.col_scale), bytes_of(turned.row_scale))
    assert torch.equal(q.row_data, turned.col_data)
    assert torch.equal(q.scale_inv, turned.scale_inv)


@properties
@given(x=tensors, two_dimensional=st.booleans(), power=st.integers(-60, 60))
def test_a_power_of_two_only_changes_the_global_scale(x, two_dimensional, power) -> None:
    q, other = quantize(x, two_dimensional), quantize(x * 2.0**power, two_dimensional)
    assert torch.equal(q.row_data, other.row_data)
    assert torch.equal(bytes_of(q.row_scale), bytes_of(other.row_scale))
    assert torch.equal(q.scale_inv * 2.0**power, other.scale_inv)


@properties
@given(x=tensors, two_dimensional=st.booleans(), copies=st.integers(1, 5))
def test_rows_are_quantized_apart_under_one_global_scale(x, two_dimensional, copies) -> None:
    """Concatenating along the dimension that is not scaled commutes, whole blocks of it."""
    x = torch.cat([x] * 16) if two_dimensional else x
    flipped = x.flip(1)  # the same amax
    parts = [quantize(part, two_dimensional) for part in [x, *[flipped] * copies]]
    whole = quantize(torch.cat([x, *[flipped] * copies]), two_dimensional)
    assert torch.equal(whole.row_data, torch.cat([part.row_data for part in parts]))
    scales = torch.cat([bytes_of(part.row_scale) for part in parts])
    assert torch.equal(bytes_of(whole.row_scale), scales)


CASTS = [(False, False, 0, 0, True, True), (True, True, 2**40, 3, True, True)]
CASTS += [(False, True, -1, 2, True, False), (True, False, 0, 0, False, True)]


@pytest.mark.parametrize("args", CASTS, ids=str)
@pytest.mark.parametrize("kind", ["ragged", "transposed", "strided"])
def test_opcheck(kind: str, args: tuple) -> None:
    """Without torch's test of the schema, which cannot compare FP8."""
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    x = sample(kind)
    before = x.clone()
    torch.library.opcheck(torch.ops.quaver.nvfp4_cast.default, (x, *args), test_utils=tests)
    data, scale, _, _, scale_inv = nvfp4_cast(x, *args[:4], True, False)
    dequantizing = (data, scale, scale_inv, args[0], x.shape[1], torch.bfloat16)
    torch.library.opcheck(torch.ops.quaver.nvfp4_dequantize.default, dequantizing, test_utils=tests)
    assert torch.equal(x, before)


def described(tensors) -> list[tuple]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("args", CASTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fake_and_meta_results_look_like_real_ones(name: str, args: tuple) -> None:
    x = flat(sample(name))
    data, scale, _, _, scale_inv = real = nvfp4_cast(x, *args)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = torch.ops.quaver.nvfp4_cast(mode.from_tensor(x), *args)
    for other in (fake, nvfp4_cast(x.to("meta"), *args)):
        assert described(other) == described(real)
    if args[4]:
        there = (t.to("meta") for t in (data, scale, scale_inv))
        restored = nvfp4_dequantize(*there, args[0], x.shape[1], torch.float16)
        assert restored.device.type == "meta"
        assert restored.shape == x.shape
        assert restored.dtype == torch.float16


@pytest.mark.parametrize("args", CASTS, ids=str)
def test_bytes_on_a_device_equal_those_on_the_cpu(args: tuple, devices) -> None:
    for name in NAMES:
        here = nvfp4_cast(flat(sample(name, torch.bfloat16)), *args)
        there = nvfp4_cast(flat(sample(name, torch.bfloat16, devices[1])), *args)
        assert all(t.device == devices[1] for t in there)
        for a, b in zip(here, there, strict=True):
            assert torch.equal(bytes_of(a), bytes_of(b))
        if args[4]:
            columns = flat(sample(name)).shape[1]
            expected = dequantize(here[0], here[1], here[4], columns, args[0])
            got = dequantize(there[0], there[1], there[4], columns, args[0])
            assert got.device == devices[1]
            torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
