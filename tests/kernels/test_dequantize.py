"""From payload to values: one product in float32, one rounding."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quaver.kernels import cast, dequantize
from tests.kernels import numerics
from tests.samples import DTYPES, FORMATS, NAMES, sample

NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_inv", [1.0, 0.27027026, 3.0e30, 1.0e-42])
def test_every_payload_byte(scale_inv: float, dtype, fmt) -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt).reshape(16, 16)
    scale = torch.tensor([scale_inv])
    values = dequantize(data, scale, dtype)
    with np.errstate(all="ignore"):
        expected = numerics.dequantized(data, scale).astype(NUMPY[dtype]).astype(np.float32)
    assert values.dtype == dtype
    np.testing.assert_array_equal(numerics.to_float32(values), expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_quantized_comes_back_within_half_a_step(name: str) -> None:
    x = sample(name)
    unset = torch.zeros(1)
    data, _, scale_inv = cast(x, unset, None, unset, 0, torch.float8_e4m3fn, False)
    back = dequantize(data, scale_inv, torch.float32)
    assert back.shape == x.shape
    finite = torch.isfinite(x)
    # three bits of mantissa: 2^-4 of the value; below the smallest normal, half its last bit
    step = torch.maximum(x.abs() * 2.0**-4, 2.0**-10 * scale_inv)
    assert (back - x).abs()[finite].le(step[finite] * 1.001).all()
    assert torch.equal(torch.isnan(back), torch.isnan(x))


def test_strides_are_those_of_the_payload() -> None:
    data = sample("ragged").to(torch.float8_e5m2).t()
    assert dequantize(data, torch.ones(1), torch.bfloat16).stride() == data.stride()
