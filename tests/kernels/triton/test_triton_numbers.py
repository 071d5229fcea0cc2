"""The arithmetic of Triton kernels, in the interpreter: against ml_dtypes and the references."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quaver.kernels.common import triton_numbers as numbers
from quaver.kernels.current_cast.reference import current_scale
from quaver.kernels.mx_cast.reference import e8m0_bytes, power_of_two
from tests.kernels.numerics import LIMIT, cast_bits
from tests.samples import FORMATS

COUNT = 2**16
TINY = 1.0e-44

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)


@triton.jit
def bytes_of(x, into, E5M2: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(into + index, numbers.fp8_bytes(tl.load(x + index), E5M2, False))


@triton.jit
def scales_of(amax, scale, byte, power, limit, epsilon, POWER_2: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    value = tl.load(amax + index)
    tl.store(scale + index, numbers.current_scale(value, limit, epsilon, POWER_2))
    coded = numbers.e8m0_bytes(value, limit)
    tl.store(byte + index, coded)
    tl.store(power + index, numbers.power_of_two(254 - coded))


@triton.jit
def narrow(x, into, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(into + index, numbers.narrowed(tl.load(x + index), into.dtype.element_ty, False))


@triton.jit
def raise_to(x, cells, COUNT: tl.constexpr):
    numbers.raise_cell(cells + 1, numbers.block_amax(tl.load(x + tl.arange(0, COUNT)), None))


def any_floats() -> torch.Tensor:
    """Random bits: every exponent, both signs, NaN and inf."""
    bits = torch.randint(-(2**31), 2**31, (COUNT,), dtype=torch.int64).to(torch.int32)
    bits[:4] = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, -0x80000000]).to(torch.int32)
    return bits.view(torch.float32)


def fp8_bytes(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    padded = torch.zeros(triton.next_power_of_2(x.numel()))
    padded[: x.numel()] = x
    into = torch.empty(padded.shape, dtype=torch.uint8)
    bytes_of[(1,)](padded, into, E5M2=dtype == torch.float8_e5m2, COUNT=padded.numel())
    return into[: x.numel()].numpy()


@formats
def test_bytes_of_any_floats(dtype) -> None:
    x = any_floats()
    np.testing.assert_array_equal(fp8_bytes(x, dtype), cast_bits(x, np.float32(1), dtype))


@formats
def test_bytes_of_every_tie_and_its_neighbours(dtype) -> None:
    last = 0x7E if dtype == torch.float8_e4m3fn else 0x7B
    values = torch.arange(last + 1, dtype=torch.uint8).view(dtype).to(torch.float32)
    ties = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(ties, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    x = torch.cat([values, ties, *around, torch.tensor([float(LIMIT[dtype]) * 1.1])])
    x = torch.cat([x, -x])
    np.testing.assert_array_equal(fp8_bytes(x, dtype), cast_bits(x, np.float32(1), dtype))


@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1.0e-6])
def test_scales_of_any_amaxes(power_2: bool, epsilon: float) -> None:
    amax = any_floats().abs()
    scale, power = torch.empty(COUNT), torch.empty(COUNT)
    byte = torch.empty(COUNT, dtype=torch.int32)
    scales_of[(1,)](amax, scale, byte, power, 448.0, epsilon, POWER_2=power_2, COUNT=COUNT)
    assert torch.equal(scale, current_scale(amax, 448.0, power_2, epsilon))
    known = ~amax.isnan()
    expected = e8m0_bytes(amax, 448.0)
    assert torch.equal(byte[known], expected[known])
    assert torch.equal(power[known], power_of_two(254 - expected)[known])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even(dtype) -> None:
    x, into = any_floats(), torch.empty(COUNT, dtype=dtype)
    narrow[(1,)](x, into, COUNT=COUNT)
    expected = x.to(dtype)
    assert torch.equal(into.isnan(), expected.isnan())
    assert torch.equal(into.nan_to_num(0.0, 1.0, -1.0), expected.nan_to_num(0.0, 1.0, -1.0))


def test_a_cell_is_raised_but_never_lowered() -> None:
    cells = torch.zeros(3)
    for values, expected in (
        ([TINY, -0.0], TINY),
        ([1.0, torch.nan], 1.0),
        ([0.5, 0.0], 1.0),
        ([torch.nan, torch.nan], 1.0),
        ([-3.0, 2.0], 3.0),
        ([-torch.inf, 2.0], torch.inf),
    ):
        raise_to[(1,)](torch.tensor(values), cells, COUNT=2)
        assert torch.equal(cells, torch.tensor([0.0, expected, 0.0]))
