"""The cast to FP8, bit for bit against NumPy and ml_dtypes."""

import numpy as np
import pytest
import torch

from quaver.kernels import cast
from tests.kernels import numerics
from tests.samples import DTYPES, FORMATS, NAMES, normal, sample

SCALES = (1.0, 3.7, 2.0**-9, 22400.0, 3.0e38, 1.0e-38)

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
inputs = pytest.mark.parametrize("source", DTYPES, ids=str)


def quantized(x, scale, dtype, **options):
    scale = torch.tensor([scale], dtype=torch.float32, device=x.device)
    amax, ready = options.get("amax"), options.get("ready")
    return cast(x, scale, amax, ready, 0, dtype, options.get("columnwise", False))


@formats
@inputs
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_cast_bit_for_bit(name: str, source, dtype) -> None:
    x = sample(name, source)
    for scale in SCALES:
        amax = torch.zeros(1)
        data, transposed, scale_inv = quantized(x, scale, dtype, amax=amax, columnwise=True)
        expected = numerics.cast_bits(x, scale, dtype)
        assert data.shape == x.shape
        assert data.dtype == dtype
        assert data.is_contiguous()
        np.testing.assert_array_equal(numerics.payload_bits(data), expected)
        rows = expected.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
        np.testing.assert_array_equal(numerics.payload_bits(transposed), rows.T)
        assert transposed.is_contiguous()
        assert scale_inv.shape == (1,)
        assert scale_inv.numpy() == numerics.divided(1.0, np.float32([scale]))
        assert amax.numpy() == numerics.amax_of(x)


@formats
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_every_16_bit_input_is_cast_bit_for_bit(scale: float, source, dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    data, _, _ = quantized(x, scale, dtype)
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, scale, dtype))


@formats
def test_ties_round_to_even_and_the_ends_saturate(dtype) -> None:
    """Every midpoint of two neighbouring values, and the floats on either side of it."""
    bits = np.arange(0, 127 if dtype == torch.float8_e4m3fn else 124, dtype=np.uint8)
    values = bits.view(numerics.FP8[dtype]).astype(np.float32)
    middles = (values[:-1] + values[1:]) / 2
    points = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))]
    )
    data, _, _ = quantized(torch.from_numpy(points), 1.0, dtype)
    got = numerics.payload_bits(data)
    n = len(middles)
    low, high = bits[:-1], bits[1:]
    np.testing.assert_array_equal(got[:n], np.where(low % 2 == 0, low, high))
    np.testing.assert_array_equal(got[n : 2 * n], low)
    np.testing.assert_array_equal(got[2 * n :], high)
    limit = float(numerics.LIMIT[dtype])
    beyond = torch.tensor([limit * 1.01, -limit * 1.3, torch.inf, -torch.inf, torch.nan])
    data = quantized(beyond, 1.0, dtype)[0].to(torch.float32)
    assert data[:4].tolist() == [limit, -limit, limit, -limit]
    assert data[4].isnan()


@formats
@inputs
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_was_never_set_gives_way_to_the_own_amax(name: str, source, dtype) -> None:
    x = sample(name, source)
    limit = float(numerics.LIMIT[dtype])
    own = numerics.scale_of(np.float32([numerics.amax_of(x)]), limit)
    data, _, scale_inv = quantized(x, 3.7, dtype, ready=torch.zeros(1))
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, own[0], dtype))
    assert scale_inv.numpy() == numerics.divided(1.0, own)
    data, _, scale_inv = quantized(x, 3.7, dtype, ready=torch.ones(1))
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, 3.7, dtype))
    assert scale_inv.numpy() == numerics.divided(1.0, np.float32([3.7]))


@formats
@pytest.mark.parametrize("margin", [-1, 2])
def test_the_own_amax_leaves_the_margin(margin: int, dtype) -> None:
    x = normal(4, 8)
    limit = float(numerics.LIMIT[dtype]) / 2**margin
    own = numerics.scale_of(np.float32([numerics.amax_of(x)]), limit)
    unset, known = torch.zeros(1), torch.ones(1)
    data, _, scale_inv = cast(x, known, None, unset, 0, dtype, False, margin)
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, own[0], dtype))
    assert scale_inv.numpy() == numerics.divided(1.0, own)
    _, _, scale_inv = cast(x, known, None, known, 0, dtype, False, margin)
    assert scale_inv.item() == 1.0, "a scale that is set has its margin in it"


@formats
def test_scale_amax_and_readiness_are_read_and_written_in_their_slot_only(dtype) -> None:
    x = normal(4, 8)
    scale = torch.tensor([0.5, 2.0, 64.0])
    ready = torch.tensor([0.0, 1.0, 0.0])
    history = torch.zeros(5, 3)
    history[0] = torch.tensor([9.0, 0.25, 7.0])
    before = history.clone()
    data, _, scale_inv = cast(x, scale, history, ready, 1, dtype, False)
    np.testing.assert_array_equal(numerics.payload_bits(data), numerics.cast_bits(x, 2.0, dtype))
    assert scale_inv.item() == 0.5
    before[0, 1] = x.abs().max()
    assert torch.equal(history, before)
    cast(x / 100, scale, history, ready, 1, dtype, False)
    assert torch.equal(history, before), "a smaller amax must not replace a larger one"


def test_no_transposed_copy_is_made_unless_asked_for() -> None:
    _, transposed, _ = quantized(normal(4, 8), 1.0, torch.float8_e4m3fn)
    assert transposed.numel() == 0


@inputs
def test_the_input_is_left_as_it_was(source) -> None:
    x = normal(6, 10, dtype=source)
    twin = x.clone()
    quantized(x, 100.0, torch.float8_e4m3fn, amax=torch.zeros(1), ready=torch.zeros(1))
    assert torch.equal(x, twin)
