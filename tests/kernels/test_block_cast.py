"""Casts in blocks of 1x128 and 128x128, bit for bit against NumPy, ml_dtypes and recorded values.

data/block_quantizers.npz holds what TransformerEngine 2.20.2 computed on an H200 from the inputs of
data/quantizers.npz, of the normal input [:128, :256] only:
`block{1,2}d_INPUT_DTYPE_FORMAT_pow2P` + `_rowwise_data`, `_rowwise_scale_inv`, `_columnwise_data`
(with 1 dimension only: with 2 it is the transpose of the row-wise one), `_columnwise_scale_inv`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.kernels.block_cast.op import block_cast, block_dequantize
from quaver.kernels.current_cast import tiles
from tests.kernels import block_numerics, numerics
from tests.kernels.block_numerics import bits_of, finite_matrix, matrices, same_bits
from tests.samples import DTYPES, FORMATS, normal

DATA = Path(__file__).parents[1] / "data"
E4M3, E5M2 = FORMATS
BLOCKS = {1: (1, 128), 2: (128, 128)}

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
inputs = pytest.mark.parametrize("source", DTYPES, ids=str)
dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])
power_2s = pytest.mark.parametrize("power_2", [False, True], ids=["any", "power_2"])
properties = settings(derandomize=True, deadline=None, max_examples=30)
seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 300)


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name) as file:
        return dict(file)


def tensor(array: np.ndarray) -> torch.Tensor:
    """bfloat16 is stored as its bits in uint16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(autouse=True, params=[None, 4096], ids=["", "small_tiles"])
def _tiles(request, monkeypatch) -> None:
    """Once more with tiles so small that the samples have several."""
    if request.param is not None:
        monkeypatch.setattr(tiles, "TILE_VALUES", request.param)


def check(x: torch.Tensor, dtype: torch.dtype, dim: int, power_2: bool, epsilon: float) -> None:
    """Both usages, against blocks that are cast one after the other."""

    def rule(amax: np.float32) -> tuple[np.float32, np.float32]:
        limit = numerics.LIMIT[dtype]
        scale = block_numerics.scale_of(np.float32([amax]), limit, power_2, epsilon)
        return scale[0], numerics.divided(1.0, scale)[0]

    row, row_inv, col, col_inv = block_cast(x, dtype, dim, power_2, epsilon, True, True)
    for data, scale_inv, source in ((row, row_inv, x), (col, col_inv, x.t())):
        bits, inverses = block_numerics.cast_blocks(source, dtype, BLOCKS[dim], rule)
        assert data.dtype == dtype
        np.testing.assert_array_equal(numerics.payload_bits(data), bits, strict=True)
        np.testing.assert_array_equal(scale_inv.numpy(), inverses, strict=True)
        assert data.is_contiguous()
        assert scale_inv.is_contiguous()


@dims
@formats
@inputs
@power_2s
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_every_sample_is_cast_bit_for_bit(epsilon, power_2, source, dtype, dim) -> None:
    for x in matrices(source):
        check(x, dtype, dim, power_2, epsilon)


@dims
@pytest.mark.parametrize("power", ["pow20", "pow21"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["special", "normal"])
def test_payload_and_scales_are_those_recorded(kind, source, fmt, power, dim) -> None:
    golden = recorded("block_quantizers.npz")
    x = tensor(recorded("quantizers.npz")[f"in_{kind}_{source}"])[:128, :256]
    tag = f"block{dim}d_{kind}_{source}_{fmt}_{power}"
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[fmt]
    row, row_inv, col, col_inv = block_cast(x, dtype, dim, power == "pow21", 0.0, True, True)
    rows = golden[f"{tag}_rowwise_data"]
    columns = golden[f"{tag}_columnwise_data"] if dim == 1 else rows.T
    np.testing.assert_array_equal(numerics.payload_bits(row), rows, strict=True)
    np.testing.assert_array_equal(numerics.payload_bits(col), columns, strict=True)
    np.testing.assert_array_equal(row_inv.numpy(), golden[f"{tag}_rowwise_scale_inv"], strict=True)
    np.testing.assert_array_equal(
        col_inv.numpy(), golden[f"{tag}_columnwise_scale_inv"], strict=True
    )


@formats
@power_2s
def test_blocks_of_every_kind_of_amax(power_2: bool, dtype) -> None:
    """A row, and so a block, for each amax: all ends of float32, beside a NaN, ties and zeros."""
    limit = numerics.LIMIT[dtype]
    turn = np.float32(limit / numerics.FLOAT32_MAX)
    amaxes = [0.0, 2.0**-149, 2.0**-127, 2.0**-126, turn, np.nextafter(turn, np.float32(0)), limit]
    amaxes += [np.nextafter(limit, np.float32(1e9)), 3.0, 2.0**127, numerics.FLOAT32_MAX, np.inf]
    parts = [1.0, -1.0, 0.53125, 17 / 256, -(2.0**-9), 3 * 2.0**-10, 2.0**-10, 0.0, -0.0]
    x = np.zeros((len(amaxes), 20), np.float32)
    with np.errstate(invalid="ignore"):
        x[:, : len(parts)] = np.float32(amaxes)[:, None] * np.float32(parts)
    x[np.isnan(x)] = 0  # inf * 0
    x[:, 12] = np.nan
    check(torch.from_numpy(x), dtype, 1, power_2, 0.0)
    check(torch.from_numpy(x).t(), dtype, 1, power_2, 0.0)


def test_zero_and_infinite_blocks_have_scale_1_and_saturate() -> None:
    x = torch.zeros(2, 256)
    x[0, 3], x[0, 4], x[1, 200], x[1, 201] = torch.inf, 5.0, -torch.inf, torch.nan
    data, scale_inv, _, _ = block_cast(x, E4M3, 1, False, 0.0, True, False)
    assert torch.equal(scale_inv, torch.ones(2, 2))
    values = data.to(torch.float32)
    assert values[0, 3:5].tolist() == [448.0, 5.0]
    assert values[1, 200].item() == -448.0
    assert values[1, 201].isnan()
    assert values.isnan().sum() == 1


@dims
@formats
def test_every_nan_gives_the_same_byte(dtype, dim) -> None:
    """Whatever its sign and bits are; 1 beside it is the amax."""
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFA5A5A5])
    x = torch.from_numpy(np.concatenate([bits.view(np.float32), np.float32([1])])).reshape(1, 7)
    row, row_inv, col, col_inv = block_cast(x, dtype, dim, True, 0.0, True, True)
    assert bits_of(row)[0, :6].tolist() == [0x7F] * 6
    assert bits_of(col)[:6, 0].tolist() == [0x7F] * 6
    power = {E4M3: 2.0**-8, E5M2: 2.0**-15}[dtype]
    assert row_inv.tolist() == [[power]]
    assert col_inv.tolist() == ([[1.0]] * 6 + [[power]] if dim == 1 else [[power]])


def test_an_epsilon_bounds_the_scale() -> None:
    x = torch.full((1, 8), 0.125)
    assert block_cast(x, E4M3, 1, True, 4.0, True, False)[1].item() == 2.0**-6
    assert block_cast(x, E4M3, 1, True, 0.0, True, False)[1].item() == 2.0**-11


@dims
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_only_what_is_asked_for_is_made(dim, rowwise, columnwise) -> None:
    x = normal(130, 140)
    both = block_cast(x, E4M3, dim, True, 0.0, True, True)
    results = block_cast(x, E4M3, dim, True, 0.0, rowwise, columnwise)
    wanted = (rowwise, rowwise, columnwise, columnwise)
    empty = tuple(result.new_empty(0) for result in both)
    same_bits(results, tuple(b if w else e for w, b, e in zip(wanted, both, empty, strict=True)))


@dims
def test_results_share_no_memory_and_the_input_is_left_as_it_was(dim) -> None:
    for shape in ((1, 40), (40, 1), (130, 5)):
        x = normal(*shape)
        twin = x.clone()
        row, row_inv, col, col_inv = block_cast(x, E4M3, dim, True, 0.0, True, True)
        before = bits_of(col).copy(), bits_of(col_inv).copy()
        row.view(torch.uint8).zero_()
        row_inv.zero_()
        np.testing.assert_array_equal(bits_of(col), before[0])
        np.testing.assert_array_equal(bits_of(col_inv), before[1])
        assert torch.equal(x, twin)


@dims
@formats
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantizing_multiplies_in_float32_and_rounds_once(to, dtype, dim) -> None:
    x = normal(130, 300) * torch.logspace(-3, 2, 130).unsqueeze(1)
    row, row_inv, col, col_inv = block_cast(x, dtype, dim, False, 0.0, True, True)
    height, width = BLOCKS[dim]
    for data, scale_inv in ((row, row_inv), (col, col_inv)):
        wide = np.repeat(np.repeat(scale_inv.numpy(), height, 0), width, 1)
        wide = torch.from_numpy(wide[: data.shape[0], : data.shape[1]].copy())
        expected = torch.from_numpy(numerics.dequantized(data, wide)).to(to)
        got = block_dequantize(data, scale_inv, dim, to)
        assert got.dtype == to
        assert got.is_contiguous()
        assert torch.equal(got, expected)
        assert torch.equal(block_dequantize(data.t().contiguous().t(), scale_inv, dim, to), got)


def test_a_wrong_number_of_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_dim must be 1 .* or 2 .*, not 3"):
        block_cast(normal(2, 2), E4M3, 3, True, 0.0, True, False)
    with pytest.raises(ValueError, match="not 0"):
        block_dequantize(normal(2, 2).to(E4M3), torch.ones(2, 1), 0, torch.float32)


@properties
@given(seeds, sides, sides, st.sampled_from(FORMATS), st.booleans(), st.sampled_from([1, 2]))
def test_what_comes_back_is_within_half_a_step(seed, rows, columns, dtype, power_2, dim) -> None:
    x = finite_matrix(rows, columns, seed, -30, 30)
    row, row_inv, col, col_inv = block_cast(x, dtype, dim, power_2, 0.0, True, True)
    for data, scale_inv, source in ((row, row_inv, x), (col, col_inv, x.t())):
        ones = torch.ones(source.shape).to(dtype)
        scale = block_dequantize(ones, scale_inv, dim, torch.float32).numpy()
        back = block_dequantize(data, scale_inv, dim, torch.float32).numpy()
        error = np.abs(back - source.numpy().astype(np.float64))
        assert (error <= block_numerics.half_steps(source.numpy(), scale, dtype)).all()


@properties
@given(seeds, sides, sides, st.booleans(), st.sampled_from([1, 2]))
def test_columnwise_is_rowwise_of_the_transpose(seed, rows, columns, power_2, dim) -> None:
    x = finite_matrix(rows, columns, seed, -12, 12)
    results = block_cast(x, E4M3, dim, power_2, 0.0, False, True)
    same_bits(results[2:], block_cast(x.t(), E4M3, dim, power_2, 0.0, True, False)[:2])


@properties
@given(seeds, sides, st.integers(-40, 40), st.booleans(), st.sampled_from([1, 2]))
def test_a_power_of_two_moves_the_scales_only(seed, columns, shift, power_2, dim) -> None:
    x = finite_matrix(140, columns, seed, -12, 12)
    x[x == 0] = 1.0  # a block of zeros has scale 1, whatever it is multiplied with
    row, row_inv, col, col_inv = block_cast(x, E4M3, dim, power_2, 0.0, True, True)
    moved = block_cast(x * 2.0**shift, E4M3, dim, power_2, 0.0, True, True)
    same_bits(moved, (row, row_inv * 2.0**shift, col, col_inv * 2.0**shift))


@properties
@given(seeds, sides, st.integers(0, 200), st.integers(1, 200))
def test_concatenation_along_rows_commutes(seed, columns, first, second) -> None:
    x = finite_matrix(first + second, columns, seed, -12, 12)
    whole = block_cast(x, E4M3, 1, True, 0.0, True, False)
    parts = [block_cast(part, E4M3, 1, True, 0.0, True, False) for part in (x[:first], x[first:])]
    for i in range(2):
        np.testing.assert_array_equal(
            bits_of(whole[i]), np.concatenate([bits_of(part[i]) for part in parts])
        )


@properties
@given(seeds, sides, st.integers(0, 2), st.integers(1, 200))
def test_concatenation_at_the_edge_of_a_block_commutes(seed, columns, blocks, second) -> None:
    first = 128 * blocks
    x = finite_matrix(first + second, columns, seed, -12, 12)
    whole = block_cast(x, E5M2, 2, False, 0.0, True, False)
    parts = [block_cast(part, E5M2, 2, False, 0.0, True, False) for part in (x[:first], x[first:])]
    for i in range(2):
        np.testing.assert_array_equal(
            bits_of(whole[i]), np.concatenate([bits_of(part[i]) for part in parts])
        )


@dims
@pytest.mark.parametrize("usages", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (0, 7), (5, 0), (130, 257), (1, 300)], ids=str)
def test_meta_tensors_give_the_shapes(shape, usages, dim) -> None:
    real = block_cast(normal(*shape), E4M3, dim, True, 0.0, *usages)
    x = torch.empty(shape, device="meta")
    for results in (
        block_cast(x, E4M3, dim, True, 0.0, *usages),
        torch.ops.quaver.block_cast(x, E4M3, dim, True, 0.0, *usages),
    ):
        assert [(r.shape, r.dtype, r.stride()) for r in results] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]
        assert all(r.is_meta for r in results)
    data, scale_inv = block_cast(x, E4M3, dim, True, 0.0, True, False)[:2]
    back = block_dequantize(data, scale_inv, dim, torch.bfloat16)
    assert (back.shape, back.dtype, back.is_meta) == (shape, torch.bfloat16, True)


@dims
@inputs
def test_the_operators_are_registered_well(source, dim) -> None:
    x = normal(6, 140, dtype=source)
    for usages in ((True, True), (True, False), (False, True)):
        args = (x, E4M3, dim, True, 0.0, *usages)
        torch.library.opcheck(torch.ops.quaver.block_cast.default, args)
    data, scale_inv, _, _ = block_cast(x, E4M3, dim, True, 0.0, True, False)
    # Without torch's test of the schema, which cannot compare FP8 inputs.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    args = (data, scale_inv, dim, source)
    torch.library.opcheck(torch.ops.quaver.block_dequantize.default, args, test_utils=tests)


@dims
@formats
@inputs
def test_devices_give_the_bytes_of_the_cpu(devices, source, dtype, dim) -> None:
    for x in matrices(source):
        expected = block_cast(x, dtype, dim, False, 0.0, True, True)
        back = block_dequantize(expected[0], expected[1], dim, torch.float32)
        for device in devices:
            results = block_cast(x.to(device), dtype, dim, False, 0.0, True, True)
            assert {result.device for result in results} == {device}
            same_bits(results, expected)
            there = block_dequantize(results[0], results[1], dim, torch.float32)
            assert there.device == device
            np.testing.assert_array_equal(there.cpu().numpy(), back.numpy())
