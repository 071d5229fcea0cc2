"""The kernels of block formats: Triton's results on any device against the CPU's reference."""

from typing import Any

import torch

from quaver import kernels
from quaver.devices import runs_triton
from tests.kernels.triton.per_tensor import MATRICES as SAMPLES
from tests.kernels.triton.per_tensor import assert_same, both, check
from tests.samples import DTYPES, normal, sample

LARGE = {"tiles_of_64": (70, 68), "tiles_of_128": (140, 132)}
"""Matrices that need several tiles in both directions: their shapes."""
CASES = [(name, source) for name in SAMPLES for source in DTYPES]
"""The samples' names and dtypes."""


def several_tiles(side: int) -> list[tuple[str, torch.dtype]]:
    """A matrix of several tiles of `side` by `side`, and one that is the transpose of such."""
    return [(f"tiles_of_{side}", torch.bfloat16), (f"tiles_of_{side}_transposed", torch.bfloat16)]


Usages = tuple[bool, bool]
BOTH = (True, True)


def matrix(name: str, source: torch.dtype, device: torch.device) -> torch.Tensor:
    """The sample or large matrix `name`, with its strides."""
    upright = name.removesuffix("_transposed")
    if upright not in LARGE:
        return sample(name, source, device)
    shape = LARGE[upright]
    if upright == name:
        return normal(*shape, dtype=source, device=device, name=name)
    return normal(*shape[::-1], dtype=source, device=device, name=name).t()


def check_block_cast(
    x: tuple[str, torch.dtype],
    dtype: torch.dtype,
    dim: int,
    power_2: bool,
    epsilon: float,
    device: torch.device,
    usages: Usages = BOTH,
) -> None:
    """`block_cast` of a matrix (name, dtype), and back to its dtype."""

    def make(device: torch.device) -> tuple[Any, ...]:
        return matrix(*x, device), dtype, dim, power_2, epsilon, *usages

    expected, found = both(kernels.block_cast, make, device)
    by_block = dim == 1 and runs_triton(device.type)  # the scales' order in memory
    assert_same(expected, found, strides=not by_block)
    if by_block:
        for data, scale in (found[:2], found[2:4]):
            assert data.is_contiguous()
            assert scale.dim() == 1 or scale.t().is_contiguous()
    data, scale_inv = expected[:2] if usages[0] else expected[2:4]

    def back(device: torch.device) -> tuple[Any, ...]:
        return data.to(device), scale_inv.to(device), dim, x[1]

    if data.dim() == 2:
        check(kernels.block_dequantize, back, device)


def check_mx_cast(
    x: tuple[str, torch.dtype],
    dtype: torch.dtype,
    device: torch.device,
    usages: Usages = BOTH,
) -> None:
    """`mx_cast` of a matrix (name, dtype), and back to its dtype."""

    def make(device: torch.device) -> tuple[Any, ...]:
        return matrix(*x, device), dtype, *usages

    expected, found = both(kernels.mx_cast, make, device)
    assert_same(expected, found)
    data, scale_inv = expected[:2] if usages[0] else expected[2:4]

    def back(device: torch.device) -> tuple[Any, ...]:
        return data.to(device), scale_inv.to(device), x[1]

    if data.dim() == 2:
        check(kernels.mx_dequantize, back, device)


def check_nvfp4_cast(
    x: tuple[str, torch.dtype],
    two_dimensional: bool,
    numbers: tuple[int, int, int | None] | None,
    device: torch.device,
    usages: Usages = BOTH,
) -> None:
    """`nvfp4_cast` of a matrix (name, dtype), and back to its dtype.

    Args:
        numbers: seed, offset and step of stochastic rounding; None: round to nearest.
    """
    seed, offset, step = numbers or (0, 0, None)

    def make(device: torch.device) -> tuple[Any, ...]:
        raised = None if step is None else torch.tensor([step], device=device)
        options = two_dimensional, numbers is not None, seed, offset, *usages
        return matrix(*x, device), *options, raised

    expected, found = both(kernels.nvfp4_cast, make, device)
    assert_same(expected, found)
    shape = matrix(*x, torch.device("cpu")).shape
    data, scale = expected[:2] if usages[0] else expected[2:4]
    columns = shape[1] if usages[0] else shape[0]

    def back(device: torch.device) -> tuple[Any, ...]:
        parts = data.to(device), scale.to(device), expected[4].to(device)
        return *parts, two_dimensional, columns, x[1]

    if data.numel() > 0:
        check(kernels.nvfp4_dequantize, back, device)


def check_hadamard(x: tuple[str, torch.dtype], device: torch.device) -> None:
    """`hadamard` of a matrix (name, dtype)."""
    check(kernels.hadamard, lambda device: (matrix(*x, device),), device)


def amaxes(dtype: torch.dtype) -> torch.Tensor:
    """float32 [n, 1]: every exponent, with the mantissas around which a rule of scales turns."""
    limit = int(torch.tensor(torch.finfo(dtype).max).view(torch.int32)) & 0x7FFFFF
    mantissas = torch.tensor([0, 1, 2, limit - 1, limit, limit + 1, limit + 2, 0x7FFFFF])
    bits = (torch.arange(255)[:, None] << 23 | mantissas).to(torch.int32)
    return bits.view(torch.float32).view(-1, 1)
