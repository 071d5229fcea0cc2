"""MXFP8 casts, bit for bit against NumPy and ml_dtypes, and against the tables of OCP MX 1.0."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.kernels.current_cast import tiles
from quaver.kernels.mx_cast.op import mx_cast, mx_dequantize
from quaver.kernels.mx_cast.reference import e8m0_bytes
from tests.kernels import block_numerics, numerics
from tests.kernels.block_numerics import bits_of, finite_matrix, matrices, same_bits
from tests.samples import DTYPES, FORMATS, normal

E4M3, E5M2 = FORMATS
E8M0 = torch.float8_e8m0fnu

# OCP Microscaling Formats (MX) Specification 1.0, the tables of FP8's and E8M0's special values.
# No infinity, no zero, and NaN at 0xFF are what it says of E8M0.
ELEMENTS = {
    E4M3: {
        0x00: 0.0, 0x01: 2.0**-9, 0x07: 0.875 * 2.0**-6, 0x08: 2.0**-6, 0x7E: 448.0,
        0x80: -0.0, 0x81: -(2.0**-9), 0x87: -0.875 * 2.0**-6, 0x88: -(2.0**-6), 0xFE: -448.0,
        0x7F: np.nan, 0xFF: np.nan,
    },
    E5M2: {
        0x00: 0.0, 0x01: 2.0**-16, 0x03: 0.75 * 2.0**-14, 0x04: 2.0**-14, 0x7B: 57344.0,
        0x80: -0.0, 0x81: -(2.0**-16), 0x83: -0.75 * 2.0**-14, 0x84: -(2.0**-14), 0xFB: -57344.0,
        0x7C: np.inf, 0xFC: -np.inf, 0x7D: np.nan, 0x7F: np.nan, 0xFF: np.nan,
    },
}  # fmt: skip
SCALES = {0x00: 2.0**-127, 0x01: 2.0**-126, 0x7E: 0.5, 0x7F: 1.0, 0x80: 2.0, 0xFE: 2.0**127}

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
inputs = pytest.mark.parametrize("source", DTYPES, ids=str)
properties = settings(derandomize=True, deadline=None, max_examples=30)
seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 150)


def payload(bits: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint8)).view(dtype)


@pytest.fixture(autouse=True, params=[None, 4096], ids=["", "small_tiles"])
def _tiles(request, monkeypatch) -> None:
    """Once more with tiles so small that the samples have several."""
    if request.param is not None:
        monkeypatch.setattr(tiles, "TILE_VALUES", request.param)


def check(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Both usages, against blocks that are cast one after the other."""

    def rule(amax: np.float32) -> tuple[np.float32, np.uint8]:
        byte = block_numerics.e8m0_of(np.float32([amax]), numerics.LIMIT[dtype])[0]
        return np.ldexp(np.float32(1), 127 - int(byte)), byte

    row, row_scale, col, col_scale = mx_cast(x, dtype, True, True)
    for data, scale, source in ((row, row_scale, x), (col, col_scale, x.t())):
        bits, bytes_ = block_numerics.cast_blocks(source, dtype, (1, 32), rule)
        assert data.dtype == dtype
        assert scale.dtype == E8M0
        np.testing.assert_array_equal(numerics.payload_bits(data), bits, strict=True)
        np.testing.assert_array_equal(bits_of(scale), bytes_, strict=True)
        assert data.is_contiguous()
        assert scale.is_contiguous()


@formats
@inputs
def test_every_sample_is_cast_bit_for_bit(source, dtype) -> None:
    for x in matrices(source):
        check(x, dtype)


@formats
def test_every_e8m0_edge(dtype) -> None:
    """The amax that is the format's end at each power of two, and the floats on either side.

    A row is a block; beside its amax it holds ties, a subnormal payload, a NaN, both zeros.
    """
    limit = numerics.LIMIT[dtype]
    with np.errstate(over="ignore"):
        ends = np.ldexp(limit, np.arange(-160, 121))
    ends = np.concatenate([ends, np.ldexp(np.float32(1), np.arange(-149, 128))])
    ends = ends[np.isfinite(ends) & (ends > 0)]
    amaxes = np.concatenate(
        [ends, np.nextafter(ends, np.float32(0)), np.nextafter(ends, np.float32(np.inf))]
    )
    amaxes = np.concatenate([amaxes[np.isfinite(amaxes)], [0.0, numerics.FLOAT32_MAX, np.inf]])
    parts = np.float32([1, -0.53125, 17 / 256, -(2.0**-9), 3 * 2.0**-10, 2.0**-17, 0.0, -0.0])
    with np.errstate(invalid="ignore", under="ignore"):
        x = amaxes.astype(np.float32)[:, None] * parts
    x[:, 6] = np.nan
    x[np.isinf(amaxes), 7] = 0  # inf * 0
    check(torch.from_numpy(x), dtype)
    scales = bits_of(mx_cast(torch.from_numpy(x), dtype, True, False)[1])
    assert {0, 1, 2, 127, 0xFE} <= set(scales.ravel().tolist())
    assert scales.max() < 0xFF


@formats
def test_the_scale_is_the_next_power_of_two_in_exact_arithmetic(dtype) -> None:
    """amax <= limit * 2^e < 2 * amax: compared in float64, in which all of it is exact."""
    bits = np.random.default_rng(11).integers(0x00800000, 0x7F800000, 300_000, dtype=np.uint32)
    amaxes = bits.view(np.float32)
    limit = float(numerics.LIMIT[dtype])
    byte = e8m0_bytes(torch.from_numpy(amaxes), limit).numpy()
    top = limit * np.ldexp(1.0, byte - 127)
    wide = amaxes.astype(np.float64)
    held = wide > limit * 2.0**-126
    assert held.mean() > 0.9
    assert (wide[held] <= top[held]).all()
    assert (top[held] < 2 * wide[held]).all()
    assert (wide <= top * (1 + 2.0**-23)).all()
    assert byte.min() == 0


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0), (2.0**-149, 0), (448 * 2.0**-127, 0), (449 * 2.0**-127, 1),
        (448 * 2.0**-126, 1), (449 * 2.0**-126, 2), (1.0, 119), (448.0, 127), (449.0, 128),
        (896.0, 128), (2.0**127, 246), (3.4028234663852886e38, 247), (torch.inf, 0xFE),
        (torch.nan, 0),
    ],
)  # fmt: skip
def test_scales_by_hand(amax: float, byte: int) -> None:
    """NaN alone is a block without an amax."""
    x = torch.zeros(1, 40)
    x[0, 7] = amax
    scales = mx_cast(x, E4M3, True, False)[1]
    assert scales.view(torch.uint8).tolist() == [[byte, 0]]


@formats
def test_values_that_are_not_finite(dtype) -> None:
    limit = float(numerics.LIMIT[dtype])
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 2.0**127, 1.0]])
    data, scale, _, _ = mx_cast(x, dtype, True, False)
    assert scale.view(torch.uint8).tolist() == [[0xFE]]
    values = data.to(torch.float32)[0]
    assert values[[0, 1, 3, 4]].tolist() == [limit, -limit, 1.0, 0.0]
    assert values[2].isnan()


@formats
def test_every_nan_gives_the_same_byte(dtype) -> None:
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFA5A5A5])
    row, scale, col, _ = mx_cast(torch.from_numpy(bits.view(np.float32))[None], dtype, True, True)
    assert bits_of(row).tolist() == [[0x7F] * 6]
    assert bits_of(col).tolist() == [[0x7F]] * 6
    assert bits_of(scale).tolist() == [[0]]


@formats
def test_every_payload_under_every_scale_is_dequantized_exactly(dtype) -> None:
    """In float64 all products are exact; float32 holds them, but for those that overflow."""
    data = torch.arange(256, dtype=torch.uint8).view(dtype).expand(256, 256)
    scale = torch.arange(256, dtype=torch.uint8).view(E8M0).unsqueeze(1).expand(256, 8)
    got = mx_dequantize(data, scale.view(torch.uint8).contiguous().view(E8M0), torch.float32)
    values = np.arange(256, dtype=np.uint8).view(numerics.FP8[dtype]).astype(np.float64)
    powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = (values[None] * powers[:, None]).astype(np.float32)
    np.testing.assert_array_equal(got.numpy(), expected, strict=True)
    assert got[0xFF].isnan().all()
    assert np.isfinite(expected[0, 1])
    assert expected[0, 1] > 0


@formats
def test_the_tables_of_the_standard(dtype) -> None:
    elements = ELEMENTS[dtype]
    data = payload([list(elements)] * len(SCALES), dtype)
    scale = payload([[byte] for byte in SCALES], E8M0)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (
            np.float64(list(SCALES.values()))[:, None] * np.float64(list(elements.values()))
        ).astype(np.float32)
    got = mx_dequantize(data, scale, torch.float32).numpy()
    np.testing.assert_array_equal(got, expected, strict=True)
    np.testing.assert_array_equal(np.signbit(got[:, :4]), np.zeros((6, 4), bool))
    nan = mx_dequantize(data, payload([[0xFF]] * len(SCALES), E8M0), torch.float32)
    assert nan.isnan().all()


@formats
def test_what_the_format_holds_comes_back_bit_for_bit(dtype) -> None:
    """A block of the format's finite values, its end among them, at the scales that fit it."""
    values = np.arange(256, dtype=np.uint8).view(numerics.FP8[dtype]).astype(np.float32)
    finite = np.flatnonzero(np.isfinite(values)).astype(np.uint8)
    end = np.flatnonzero(values == numerics.LIMIT[dtype])[0]
    blocks = finite[: len(finite) // 31 * 31].reshape(-1, 31)
    bits = np.concatenate([blocks, np.full((len(blocks), 1), end, np.uint8)], 1)
    largest = {E4M3: 246, E5M2: 239}[dtype]  # above it the end itself leaves float32
    for byte in (1, 64, 127, 200, largest):
        scale = payload(np.full((len(bits), 1), byte), E8M0)
        x = mx_dequantize(payload(bits, dtype), scale, torch.float32)
        data, again, _, _ = mx_cast(x, dtype, True, False)
        np.testing.assert_array_equal(bits_of(again), bits_of(scale), strict=True)
        np.testing.assert_array_equal(bits_of(data), bits, strict=True)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_dequantizing_rounds_once(to) -> None:
    x = normal(70, 100) * torch.logspace(-9, 3, 70).unsqueeze(1)
    for data, scale in (mx_cast(x, E4M3, True, True)[:2], mx_cast(x, E4M3, True, True)[2:]):
        got = mx_dequantize(data, scale, to)
        assert got.dtype == to
        assert got.is_contiguous()
        assert torch.equal(got, mx_dequantize(data, scale, torch.float32).to(to))


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_only_what_is_asked_for_is_made(rowwise, columnwise) -> None:
    x = normal(70, 80)
    twin = x.clone()
    both = mx_cast(x, E4M3, True, True)
    results = mx_cast(x, E4M3, rowwise, columnwise)
    wanted = (rowwise, rowwise, columnwise, columnwise)
    empty = tuple(result.new_empty(0) for result in both)
    same_bits(results, tuple(b if w else e for w, b, e in zip(wanted, both, empty, strict=True)))
    assert torch.equal(x, twin)


@properties
@given(seeds, sides, sides, st.sampled_from(FORMATS), st.integers(-120, 100))
def test_what_comes_back_is_within_half_a_step(seed, rows, columns, dtype, low) -> None:
    x = finite_matrix(rows, columns, seed, low, low + 20)
    row, row_scale, col, col_scale = mx_cast(x, dtype, True, True)
    for data, scale, source in ((row, row_scale, x), (col, col_scale, x.t())):
        powers = bits_of(scale).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        wide = np.repeat(powers, 32, 1)[:, : source.shape[1]]
        back = mx_dequantize(data, scale, torch.float32).numpy()
        error = np.abs(back - source.numpy().astype(np.float64))
        assert (error <= block_numerics.half_steps(source.numpy(), wide, dtype)).all()
        assert (np.abs(source.numpy()) <= wide * numerics.LIMIT[dtype]).all(), "nothing saturates"


@properties
@given(seeds, sides, sides, st.sampled_from(FORMATS))
def test_columnwise_is_rowwise_of_the_transpose(seed, rows, columns, dtype) -> None:
    x = finite_matrix(rows, columns, seed, -12, 12)
    same_bits(mx_cast(x, dtype, False, True)[2:], mx_cast(x.t(), dtype, True, False)[:2])


@properties
@given(seeds, sides, st.integers(-80, 80))
def test_a_power_of_two_moves_the_scales_only(seed, columns, shift) -> None:
    x = finite_matrix(70, columns, seed, -12, 12)
    x[x == 0] = 1.0  # the scale of a block of zeros stays at its end
    row, row_scale, col, col_scale = mx_cast(x, E4M3, True, True)
    moved = mx_cast(x * 2.0**shift, E4M3, True, True)
    same_bits((moved[0], moved[2]), (row, col))
    for after, before in ((moved[1], row_scale), (moved[3], col_scale)):
        difference = bits_of(after).astype(int) - bits_of(before).astype(int)
        assert (difference == shift).all()


@properties
@given(seeds, sides, st.integers(0, 130), st.integers(1, 130))
def test_concatenation_along_the_unscaled_dimension_commutes(seed, columns, first, second) -> None:
    x = finite_matrix(first + second, columns, seed, -12, 12)
    upright = mx_cast(x, E4M3, True, False)
    parts = [mx_cast(part, E4M3, True, False) for part in (x[:first], x[first:])]
    turned = mx_cast(x.t(), E4M3, False, True)
    turned_parts = [mx_cast(part, E4M3, False, True) for part in (x[:first].t(), x[first:].t())]
    for i in range(2):
        joined = np.concatenate([bits_of(part[i]) for part in parts])
        np.testing.assert_array_equal(bits_of(upright[i]), joined)
        joined = np.concatenate([bits_of(part[i + 2]) for part in turned_parts])
        np.testing.assert_array_equal(bits_of(turned[i + 2]), joined)


@pytest.mark.parametrize("usages", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (0, 7), (5, 0), (70, 65), (1, 300)], ids=str)
def test_meta_tensors_give_the_shapes(shape, usages) -> None:
    real = mx_cast(normal(*shape), E4M3, *usages)
    x = torch.empty(shape, device="meta")
    for results in (mx_cast(x, E4M3, *usages), torch.ops.quaver.mx_cast(x, E4M3, *usages)):
        assert [(r.shape, r.dtype, r.stride()) for r in results] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]
        assert all(r.is_meta for r in results)
    data, scale = mx_cast(x, E4M3, True, False)[:2]
    back = mx_dequantize(data, scale, torch.bfloat16)
    assert (back.shape, back.dtype, back.is_meta) == (shape, torch.bfloat16, True)


@inputs
def test_the_operators_are_registered_well(source) -> None:
    x = normal(6, 70, dtype=source)
    for usages in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.quaver.mx_cast.default, (x, E4M3, *usages))
    data, scale, _, _ = mx_cast(x, E4M3, True, False)
    # Without torch's test of the schema, which cannot compare FP8 inputs.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    args = (data, scale, source)
    torch.library.opcheck(torch.ops.quaver.mx_dequantize.default, args, test_utils=tests)


@formats
@inputs
def test_devices_give_the_bytes_of_the_cpu(devices, source, dtype) -> None:
    for x in matrices(source):
        expected = mx_cast(x, dtype, True, True)
        back = mx_dequantize(expected[0], expected[1], torch.float32)
        for device in devices:
            results = mx_cast(x.to(device), dtype, True, True)
            assert {result.device for result in results} == {device}
            same_bits(results, expected)
            there = mx_dequantize(results[0], results[1], torch.float32)
            assert there.device == device
            np.testing.assert_array_equal(there.cpu().numpy(), back.numpy())
