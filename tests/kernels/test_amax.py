"""The amax of a tensor, and scales from amaxes: each division is rounded once."""

import numpy as np
import pytest
import torch

from quaver.kernels import amax
from quaver.kernels.cast.reference import divide, scale_from_amax
from tests.kernels import numerics
from tests.samples import DTYPES, NAMES, sample


def positive_floats(count: int) -> np.ndarray:
    """Random positive float32 bit patterns: subnormals, normals, inf, and the two ends."""
    bits = np.random.default_rng(7).integers(0, 0x7F800001, count, dtype=np.uint32)
    bits[:4] = 0, 1, 0x7F7FFFFF, 0x7F800000
    return bits.view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_amax_of_every_sample(name: str, dtype) -> None:
    x = sample(name, dtype)
    into = torch.zeros(2, 3)
    amax(x, into, 4)
    expected = torch.zeros(2, 3)
    expected[1, 1] = float(numerics.amax_of(x))
    assert torch.equal(into, expected)


def test_amax_passes_over_nan_and_counts_infinity() -> None:
    into = torch.zeros(3)
    amax(torch.tensor([torch.nan, -3.0, 2.0]), into, 0)
    amax(torch.tensor([torch.nan, -torch.inf, 2.0]), into, 1)
    amax(torch.tensor([torch.nan, torch.nan]), into, 2)
    assert into.tolist() == [3.0, torch.inf, 0.0]


def test_amax_only_rises() -> None:
    into = torch.tensor([2.5])
    amax(torch.tensor([1.0, -2.0]), into, 0)
    assert into.item() == 2.5
    amax(torch.tensor([1.0, -4.0]), into, 0)
    assert into.item() == 4.0


@pytest.mark.parametrize("limit", [448.0, 57344.0, 448.0 / 8, 1.0])
def test_a_scale_is_the_limit_over_the_amax_rounded_once(limit: float) -> None:
    values = positive_floats(400_000)
    got = scale_from_amax(torch.from_numpy(values), limit).numpy()
    np.testing.assert_array_equal(got, numerics.scale_of(values, limit))
    assert np.isfinite(got).all()
    assert got[0] == 1.0
    assert got[1] == numerics.FLOAT32_MAX
    assert got[3] == 1.0


@pytest.mark.parametrize("numerator", [1.0, 448.0, 57344.0])
def test_a_division_is_rounded_once(numerator: float) -> None:
    values = positive_floats(400_000)
    got = divide(numerator, torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(got, numerics.divided(numerator, values))


def test_the_division_test_can_tell_a_reciprocal_from_a_division() -> None:
    values = positive_floats(400_000)
    normal = values[(values > 1e-30) & (values < 1e30)]
    twice = np.float32(448) * (np.float32(1) / normal)
    assert (twice != numerics.divided(448.0, normal)).mean() > 0.01
