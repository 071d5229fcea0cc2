"""The kernels with one scale a tensor on a GPU, bit for bit against the CPU's references."""

import pytest
import torch

from quaver.kernels import amax, cast, cast_grad, current_cast, dequantize, use_implementation
from quaver.kernels.common import triton_cast
from quaver.kernels.common.triton_tiles import Tile
from tests.kernels.triton.per_tensor import (
    MATRICES,
    PAIRS,
    assert_same,
    assert_sums,
    check_amax,
    check_cast,
    check_cast_grad,
    check_current_cast,
    check_dequantize,
)
from tests.samples import DTYPES, FORMATS, NAMES, normal

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BEYOND_32_BITS = 2**31 + 2**15

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
sources = pytest.mark.parametrize("source", DTYPES, ids=str)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


@formats
@sources
@pytest.mark.parametrize("name", NAMES)
def test_every_sample(cuda, name: str, source, dtype, monkeypatch) -> None:
    """With small tiles, which compile faster, and of which these small samples have several."""
    monkeypatch.setattr(triton_cast, "BOTH_TILE", Tile(16, 32, 4))
    monkeypatch.setattr(triton_cast, "ROWWISE_TILE", Tile(4, 32, 4))
    check_cast(name, source, dtype, cuda)
    check_dequantize(name, source, dtype, cuda)
    check_amax(name, source, cuda)
    if name in MATRICES:
        check_current_cast(name, source, dtype, cuda)
        check_cast_grad(name, source, dtype, cuda)


@pytest.mark.parametrize(("source", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(512, 384), (1000, 1041)], ids=str)
def test_whole_and_ragged_tiles(cuda, shape, source, dtype) -> None:
    """Upright and turned, with 16-byte loads and without; x's largest value in its last corner."""
    whole = normal(*shape, dtype=source)
    whole[-1, -1] = 100.0
    for x in (whole, whole.t()):
        results = []
        for device in (torch.device("cpu"), cuda):
            mine = whole.to(device) if x is whole else whole.to(device).t()
            cell, ready = torch.zeros(1, device=device), torch.zeros(1, device=device)
            one = torch.full((1,), 3.7, device=device)
            made = [
                *cast(mine, one, cell, None, 0, dtype, True),
                *cast(mine, one, None, ready, 0, dtype, False),
                *current_cast(mine, dtype, False, 0.0, None, True),
                *current_cast(mine, dtype, True, 0.0, None, False),
                *cast_grad(mine, one, None, None, 0, dtype, True)[:3],
                cell,
            ]
            results.append(made)
            sums = cast_grad(mine, one, None, ready, 0, dtype, False)[3]
            assert_sums(x, sums)
        assert_same(*results)


@formats
@sources
def test_every_float_rounds_as_on_the_cpu(cuda, source, dtype) -> None:
    """All 16-bit inputs, or a sweep over float32's bits; scales that make every rounding appear."""
    if source == torch.float32:
        bits = torch.arange(-(2**31), 2**31, 1009, dtype=torch.int64).to(torch.int32)
    else:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(source)
    for value in (1.0, 3.7, 2.0**-9, 22400.0, 3.0e38, 1.0e-38):
        results = []
        for device in (torch.device("cpu"), cuda):
            scale = torch.full((1,), value, device=device)
            results.append(list(cast(x.to(device), scale, None, None, 0, dtype, False)))
        assert_same(*results)


@formats
def test_sums_are_the_same_twice(cuda, dtype) -> None:
    x = normal(4100, 1500, dtype=torch.bfloat16, device=cuda)
    one = torch.ones(1, device=cuda)
    sums = [cast_grad(x, one, None, None, 0, dtype, True)[3] for _ in range(3)]
    assert_sums(x.cpu(), sums[0])
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_strides_beyond_32_bits(cuda) -> None:
    buffer = torch.zeros(BEYOND_32_BITS, dtype=torch.bfloat16, device=cuda)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(normal(3, 64, dtype=torch.bfloat16))
    small = x.cpu()
    for turned in (False, True):
        far, near = (t.t() if turned else t for t in (x, small))
        one = torch.ones(1)
        found = current_cast(far, E4M3, False, 0.0, None, True)
        assert_same(list(current_cast(near, E4M3, False, 0.0, None, True)), list(found))
        found = cast(far, one.to(cuda), None, None, 0, E5M2, True)
        assert_same(list(cast(near, one, None, None, 0, E5M2, True)), list(found))


def test_more_values_than_32_bits_count(cuda) -> None:
    rows, columns = 2**16 + 1, 2**15
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=cuda)
    x[-1] = normal(columns, dtype=torch.bfloat16)
    one, cell = torch.ones(1, device=cuda), torch.zeros(1, device=cuda)
    last = x[-1:].cpu()
    with use_implementation("reference"):
        expected = cast(last, torch.ones(1), None, None, 0, E4M3, True)
    data, transposed, _ = cast(x, one, cell, None, 0, E4M3, True)
    assert cell.item() == last.abs().max().item()
    assert_same([expected[0]], [data[-1:].clone()])
    assert_same([expected[1]], [transposed[:, -1:].clone()])
    cell.zero_()
    amax(x, cell, 0)
    assert cell.item() == last.abs().max().item()
    wide = dequantize(data, one, torch.bfloat16)
    assert torch.equal(wide[-1:].cpu(), dequantize(expected[0], torch.ones(1), torch.bfloat16))
    del wide, data, transposed
    sums = cast_grad(x, one, None, None, 0, E5M2, False)[3]
    assert torch.equal(sums.cpu(), last[0].to(torch.float32))
