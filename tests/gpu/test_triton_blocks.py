"""The kernels of block formats on a GPU, bit for bit against the CPU's references."""

from typing import Any

import pytest
import torch

from quaver import kernels
from quaver.kernels import use_implementation
from tests.kernels.triton.blocks import (
    CASES,
    amaxes,
    check_block_cast,
    check_hadamard,
    check_mx_cast,
    check_nvfp4_cast,
    several_tiles,
)
from tests.kernels.triton.per_tensor import assert_same, check
from tests.samples import DTYPES, FORMATS, normal

pytestmark = pytest.mark.gpu

E4M3, E5M2 = FORMATS
NUMBERS = (-7, 2**33 + 5, 2**40)
"""A seed and an offset that fill both words, and a step."""

cases = pytest.mark.parametrize("x", CASES + several_tiles(64) + several_tiles(128), ids=str)
formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
sources = pytest.mark.parametrize("source", DTYPES, ids=str)
dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])
power_2s = pytest.mark.parametrize("power_2", [False, True], ids=["any", "power_2"])


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


@cases
@dims
@power_2s
@formats
def test_block_cast_of_every_matrix(cuda, x, dtype, power_2: bool, dim: int) -> None:
    for epsilon in (0.0, 0.5):
        check_block_cast(x, dtype, dim, power_2, epsilon, cuda)
    check_block_cast(x, dtype, dim, power_2, 0.0, cuda, (True, False))
    check_block_cast(x, dtype, dim, power_2, 0.0, cuda, (False, True))


@cases
@formats
def test_mx_cast_of_every_matrix(cuda, x, dtype) -> None:
    for usages in ((True, True), (True, False), (False, True)):
        check_mx_cast(x, dtype, cuda, usages)


@cases
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["1x16", "16x16"])
def test_nvfp4_cast_of_every_matrix(cuda, x, two_dimensional: bool) -> None:
    for numbers in (None, NUMBERS, (0, 0, None)):
        for usages in ((True, True), (True, False), (False, True)):
            check_nvfp4_cast(x, two_dimensional, numbers, cuda, usages)


@cases
def test_hadamard_of_every_matrix(cuda, x) -> None:
    check_hadamard(x, cuda)


@formats
@power_2s
def test_scales_of_every_kind_of_amax(cuda, power_2: bool, dtype) -> None:
    """In columns, too: their scales take another way through the registers."""
    x = amaxes(dtype)
    for upright in (x, x.t()):

        def make(device: torch.device, x: torch.Tensor = upright) -> tuple[Any, ...]:
            return x.to(device), dtype, 1, power_2, 0.0, True, True

        check(kernels.block_cast, make, cuda)
        check(kernels.mx_cast, lambda device, x=upright: (x.to(device), dtype, True, True), cuda)


@sources
@pytest.mark.parametrize("shape", [(512, 384), (1000, 1041), (3, 4096), (4096, 16)], ids=str)
def test_whole_and_ragged_tiles(cuda, shape, source) -> None:
    """Upright and turned, with 16-byte loads and without; each block has another amax."""
    values = normal(*shape, dtype=torch.float32) * torch.logspace(-3, 3, shape[1])
    whole = values.mul_(torch.logspace(-3, 1, shape[0])[:, None]).to(source)
    for turned in (False, True):

        def make(device: torch.device, turned: bool = turned) -> torch.Tensor:
            there = whole.to(device)
            return there.t() if turned else there

        for dtype in FORMATS:
            for dim in (1, 2):
                options = (dtype, dim, True, 0.0, True, True)
                check(kernels.block_cast, lambda d, o=options: (make(d), *o), cuda)
            check(kernels.mx_cast, lambda d, f=dtype: (make(d), f, True, True), cuda)
        for square in (False, True):
            for stochastic in (False, True):
                options = (square, stochastic, 3, 4, True, True)
                check(kernels.nvfp4_cast, lambda d, o=options: (make(d), *o), cuda)
        check(kernels.hadamard, lambda d: (make(d),), cuda)


@sources
def test_every_byte_dequantizes(cuda, source) -> None:
    data = torch.arange(256).to(torch.uint8).view(8, 32).repeat(256, 1)
    byte = torch.arange(256).to(torch.uint8).repeat_interleave(8).view(-1, 1)
    e8m0 = byte.view(torch.float8_e8m0fnu)
    for dtype in FORMATS:
        values = data.view(dtype)
        check(
            kernels.mx_dequantize,
            lambda d, v=values: (v.to(d), e8m0.to(d), source),
            cuda,
        )
        scale = torch.logspace(-38, 38, 2048).view(-1, 1)
        check(
            kernels.block_dequantize,
            lambda d, v=values, s=scale: (v.to(d), s.to(d), 1, source),
            cuda,
        )
    scale = byte.repeat(1, 4).view(E4M3)
    factor = torch.tensor([0.3])
    check(
        kernels.nvfp4_dequantize,
        lambda d: (data.to(d), scale.to(d), factor.to(d), False, 63, source),
        cuda,
    )


def test_strides_beyond_32_bits(cuda) -> None:
    buffer = torch.zeros(2**31 + 2**15, dtype=torch.bfloat16, device=cuda)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(normal(3, 64, dtype=torch.bfloat16))
    small = x.cpu()
    for turned in (False, True):
        for kernel, options in (
            (kernels.block_cast, (E4M3, 1, True, 0.0, True, True)),
            (kernels.mx_cast, (E5M2, True, True)),
            (kernels.nvfp4_cast, (False, True, 1, 2, True, True)),
            (kernels.hadamard, ()),
        ):
            expected, found = (
                kernel(t.t() if turned else t, *options)  # type: ignore[operator]
                for t in (small, x)
            )
            if isinstance(found, torch.Tensor):
                expected, found = (expected,), (found,)
            assert_same(list(expected), list(found))


def test_more_values_than_32_bits_count(cuda) -> None:
    """Zeros but for the last row, which lies in a tile of its own."""
    rows, columns = 2**16 + 1, 2**15
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=cuda)
    x[-1] = normal(columns, dtype=torch.bfloat16)
    last = x[-1:].cpu()
    for kernel, options in (
        (kernels.block_cast, (E4M3, 1, True, 0.0, True, True)),
        (kernels.block_cast, (E4M3, 2, False, 0.0, True, True)),
        (kernels.mx_cast, (E5M2, True, True)),
        (kernels.nvfp4_cast, (False, False, 1, 2, True, True)),
    ):
        found = kernel(x, *options)
        expected = kernel(last, *options)
        ends = [found[0][-1:], found[1][-1:], found[2][:, -1:], found[3][:, -1:]]
        assert_same(list(expected[:4]), [end.contiguous() for end in ends])
        assert not (found[0][:-1].view(torch.uint8) & 0x7F).any()
        back = ()
        if kernel is kernels.block_cast:
            back = kernels.block_dequantize(*found[:2], options[1], torch.bfloat16)
            wanted = kernels.block_dequantize(*expected[:2], options[1], torch.bfloat16)
            assert_same([wanted], [back[-1:]])
        del found, back
    assert_same([kernels.hadamard(last)], [kernels.hadamard(x)[-1:]])


def test_random_numbers_of_more_elements_than_32_bits_count(cuda) -> None:
    """Both versions on the GPU: on the CPU the reference would take minutes."""
    x = normal(1, 2**15, dtype=torch.bfloat16, device=cuda).expand(2**16 + 64, 2**15)
    options = (False, True, 5, 6, True, False)
    found = kernels.nvfp4_cast(x, *options)[0][-64:]
    with use_implementation("reference"):
        expected = kernels.nvfp4_cast(x, *options)[0][-64:]
    assert torch.equal(found, expected)
