"""The cast with the tensor's own amax, bit for bit against NumPy, ml_dtypes and recorded values.

data/block_quantizers.npz holds what TransformerEngine 2.20.2 computed on an H200 from the inputs of
data/quantizers.npz: `current_INPUT_DTYPE_FORMAT_pow2P_epsE` + `_data` (of the normal input the
first rows only) and `_scale_inv`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.kernels.current_cast import tiles
from quaver.kernels.current_cast.op import current_cast
from tests.kernels import block_numerics, numerics
from tests.kernels.block_numerics import finite_matrix, matrices, same_bits
from tests.samples import DTYPES, FORMATS, normal

DATA = Path(__file__).parents[1] / "data"
E4M3, E5M2 = FORMATS

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
inputs = pytest.mark.parametrize("source", DTYPES, ids=str)
power_2s = pytest.mark.parametrize("power_2", [False, True], ids=["any", "power_2"])
properties = settings(derandomize=True, deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


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


def check(x: torch.Tensor, dtype: torch.dtype, power_2: bool, epsilon: float) -> None:
    data, transposed, scale_inv = current_cast(x, dtype, power_2, epsilon, None, True)
    amax = np.float32([numerics.amax_of(x)])
    scale = block_numerics.scale_of(amax, numerics.LIMIT[dtype], power_2, epsilon)
    expected = numerics.cast_bits(x, scale[0], dtype)
    assert data.dtype == transposed.dtype == dtype
    np.testing.assert_array_equal(numerics.payload_bits(data), expected, strict=True)
    np.testing.assert_array_equal(numerics.payload_bits(transposed), expected.T, strict=True)
    assert data.is_contiguous()
    assert transposed.is_contiguous()
    np.testing.assert_array_equal(scale_inv.numpy(), numerics.divided(1.0, scale), strict=True)


@formats
@inputs
@power_2s
@pytest.mark.parametrize("epsilon", [0.0, 1e-30, 100.0])
def test_every_sample_is_cast_bit_for_bit(epsilon, power_2, source, dtype) -> None:
    for x in matrices(source):
        check(x, dtype, power_2, epsilon)


@pytest.mark.parametrize("power", ["pow20", "pow21"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["special", "normal"])
def test_payload_and_scale_are_those_recorded(kind, source, fmt, power) -> None:
    golden = recorded("block_quantizers.npz")
    x = tensor(recorded("quantizers.npz")[f"in_{kind}_{source}"])
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[fmt]
    for epsilon in (0, 100):
        tag = f"current_{kind}_{source}_{fmt}_{power}_eps{epsilon}"
        rows = golden[f"{tag}_data"]
        data, transposed, scale_inv = current_cast(
            x, dtype, power == "pow21", float(epsilon), None, True
        )
        assert len(rows) > 0
        np.testing.assert_array_equal(numerics.payload_bits(data)[: len(rows)], rows)
        np.testing.assert_array_equal(numerics.payload_bits(transposed)[:, : len(rows)], rows.T)
        np.testing.assert_array_equal(scale_inv.numpy(), golden[f"{tag}_scale_inv"], strict=True)


@formats
@power_2s
def test_the_scale_of_every_kind_of_amax(power_2: bool, dtype) -> None:
    """Zeros, subnormals, where the scale overflows, the ends of float32, inf, NaN."""
    limit = numerics.LIMIT[dtype]
    turn = np.float32(limit / numerics.FLOAT32_MAX)
    amaxes = [0.0, 2.0**-149, 2.0**-126, turn, np.nextafter(turn, np.float32(0)), 2 * turn]
    amaxes += [2.0**-3, limit, np.nextafter(limit, np.float32(1e9)), 1e30, numerics.FLOAT32_MAX]
    amaxes += [np.nextafter(limit, np.float32(0)), np.inf]
    x = torch.tensor([[1.0, -0.3]])
    for amax in np.float32(amaxes):
        given_amax = torch.from_numpy(np.float32([amax]))
        data, _, scale_inv = current_cast(x, dtype, power_2, 0.0, given_amax, False)
        scale = block_numerics.scale_of(np.float32([amax]), limit, power_2, 0.0)
        assert scale_inv.numpy() == numerics.divided(1.0, scale)
        assert scale_inv.isfinite().all()
        assert scale_inv.item() > 0
        np.testing.assert_array_equal(
            numerics.payload_bits(data), numerics.cast_bits(x, scale[0], dtype)
        )
    for amax in (0.0, torch.inf, torch.nan):
        assert current_cast(x, dtype, power_2, 0.0, torch.tensor([amax]), False)[2].item() == 1.0


def test_a_tiny_amax_takes_the_largest_float32_or_its_power_of_two() -> None:
    x = torch.tensor([[1e-40]])
    assert current_cast(x, E4M3, True, 0.0, None, False)[2].item() == 2.0**-127
    inverse = current_cast(x, E4M3, False, 0.0, None, False)[2].numpy()
    assert inverse == np.float32(1) / numerics.FLOAT32_MAX


def test_values_that_are_not_finite() -> None:
    """NaN is no amax and stays; inf makes the scale 1 and saturates."""
    x = torch.tensor([[torch.nan, 2.0, -1.0]])
    data, _, scale_inv = current_cast(x, E4M3, False, 0.0, None, False)
    assert data.to(torch.float32)[0, 0].isnan()
    assert data.to(torch.float32)[0, 1:].tolist() == [448.0, -224.0]
    assert scale_inv.item() == np.float32(1) / np.float32(224)
    x = torch.tensor([[torch.inf, -torch.inf, 3.0]])
    data, _, scale_inv = current_cast(x, E4M3, False, 0.0, None, False)
    assert data.to(torch.float32).tolist() == [[448.0, -448.0, 3.0]]
    assert scale_inv.item() == 1.0


@formats
def test_every_nan_gives_the_same_byte(dtype) -> None:
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFA5A5A5])
    x = torch.from_numpy(bits.view(np.float32))[None]
    data, transposed, scale_inv = current_cast(x, dtype, False, 0.0, None, True)
    assert block_numerics.bits_of(data).tolist() == [[0x7F] * 6]
    assert block_numerics.bits_of(transposed).tolist() == [[0x7F]] * 6
    assert scale_inv.item() == 1.0


@formats
def test_a_given_amax_replaces_the_own_and_is_left_as_it_was(dtype) -> None:
    x = normal(70, 40)
    amax = torch.tensor([12.5])
    data, _, scale_inv = current_cast(x, dtype, False, 0.0, amax, False)
    scale = np.float32(numerics.LIMIT[dtype]) / np.float32(12.5)
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, scale, dtype))
    assert scale_inv.item() == np.float32(1) / scale
    assert amax.tolist() == [12.5]


def test_results_share_no_memory_and_nothing_is_transposed_unasked() -> None:
    for shape in ((1, 40), (40, 1), (3, 5)):
        x = normal(*shape)
        twin = x.clone()
        data, transposed, _ = current_cast(x, E4M3, True, 0.0, None, True)
        before = numerics.payload_bits(transposed).copy()
        data.view(torch.uint8).zero_()
        np.testing.assert_array_equal(numerics.payload_bits(transposed), before)
        assert torch.equal(x, twin)
        assert current_cast(x, E4M3, True, 0.0, None, False)[1].shape == (0,)


@properties
@given(seeds, st.sampled_from(FORMATS), st.booleans(), st.integers(-20, 20))
def test_what_comes_back_is_within_half_a_step(seed, dtype, power_2, low) -> None:
    x = finite_matrix(67, 13, seed, low, low + 12)
    data, _, scale_inv = current_cast(x, dtype, power_2, 0.0, None, False)
    scale = np.broadcast_to(scale_inv.numpy(), x.shape)
    error = np.abs(numerics.dequantized(data, scale_inv) - x.numpy().astype(np.float64))
    assert (error <= block_numerics.half_steps(x.numpy(), scale, dtype)).all()


@properties
@given(seeds, st.sampled_from(FORMATS), st.booleans(), st.integers(-40, 40))
def test_a_power_of_two_moves_the_scale_only(seed, dtype, power_2, shift) -> None:
    x = finite_matrix(66, 9, seed, -5, 6)
    x[0, 0] = 33.0
    data, _, scale_inv = current_cast(x, dtype, power_2, 0.0, None, False)
    moved, _, moved_inv = current_cast(x * 2.0**shift, dtype, power_2, 0.0, None, False)
    np.testing.assert_array_equal(numerics.payload_bits(moved), numerics.payload_bits(data))
    assert moved_inv.item() == scale_inv.item() * 2.0**shift


@properties
@given(seeds, st.booleans())
def test_the_transpose_of_the_payload_is_the_payload_of_the_transpose(seed, power_2) -> None:
    x = finite_matrix(70, 23, seed, -9, 6)
    _, transposed, scale_inv = current_cast(x, E5M2, power_2, 0.0, None, True)
    data, _, other_inv = current_cast(x.t(), E5M2, power_2, 0.0, None, False)
    same_bits((transposed, scale_inv), (data, other_inv))


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (0, 7), (5, 0), (1, 1)])
def test_meta_tensors_give_the_shapes(shape, columnwise) -> None:
    real = current_cast(normal(*shape), E4M3, True, 0.0, None, columnwise)
    x = torch.empty(shape, device="meta")
    for results in (
        current_cast(x, E4M3, True, 0.0, None, columnwise),
        torch.ops.quaver.current_cast(x, E4M3, True, 0.0, None, columnwise),
    ):
        assert [(r.shape, r.dtype, r.stride()) for r in results] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]
        assert all(r.is_meta for r in results)


@pytest.mark.parametrize("amax", [None, torch.tensor([3.0])], ids=["own", "given"])
@inputs
def test_the_operator_is_registered_well(source, amax) -> None:
    operator = torch.ops.quaver.current_cast.default
    x = normal(6, 40, dtype=source)
    torch.library.opcheck(operator, (x, E4M3, True, 0.0, amax, True))
    torch.library.opcheck(operator, (x, E5M2, False, 1.0, amax, False))


@formats
@inputs
def test_devices_give_the_bytes_of_the_cpu(devices, source, dtype) -> None:
    for x in matrices(source):
        expected = current_cast(x, dtype, False, 0.0, None, True)
        for device in devices:
            results = current_cast(x.to(device), dtype, False, 0.0, None, True)
            assert {result.device for result in results} == {device}
            same_bits(results, expected)
