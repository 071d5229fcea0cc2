"""Block formats in NumPy and ml_dtypes, one block after the other: no code of the product."""

from collections.abc import Callable

import numpy as np
import torch

from tests.kernels import numerics
from tests.samples import NAMES, normal, sample

SHAPES = ((130, 300), (129, 257), (64, 128), (1, 33), (33, 1), (200, 31))
"""Beside the samples: they cross tiles and blocks, and end in short ones."""

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
SMALLEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}

# From the amax of a block: (scale before the cast, scale that is stored).
Rule = Callable[[np.float32], tuple[np.float32, np.generic]]


def matrices(source: torch.dtype) -> list[torch.Tensor]:
    """All samples as matrices, and those of SHAPES with magnitudes that differ from row to row."""
    found = [sample(name, source) for name in NAMES]
    found = [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in found]
    for rows, columns in SHAPES:
        spread = torch.exp2(torch.linspace(-12, 9, rows)).unsqueeze(1)
        found.append((normal(rows, columns) * spread).to(source))
    return found


def power_of_two_floor(values: np.ndarray) -> np.ndarray:
    _, exponents = np.frexp(values)
    return np.ldexp(np.float32(1), exponents - 1)


def scale_of(amax: np.ndarray, limit: float, power_2: bool, epsilon: float) -> np.ndarray:
    """The float32 scale of an amax."""
    scale = numerics.scale_of(np.maximum(amax, np.float32(epsilon)), limit).astype(np.float32)
    return power_of_two_floor(scale) if power_2 else scale


def e8m0_of(amax: np.ndarray, limit: float) -> np.ndarray:
    """The E8M0 byte of an amax."""
    quotient = np.asarray(amax, np.float32) / np.float32(limit)
    fractions, exponents = np.frexp(np.where(np.isinf(quotient), 1, quotient))
    up = np.where(fractions == 0.5, exponents - 1, exponents)
    byte = np.clip(up + 127, 0, 254)
    return np.where(quotient == 0, 0, np.where(np.isinf(quotient), 254, byte)).astype(np.uint8)


def cast_blocks(
    x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Payload bytes and stored scales of x [M, K]."""
    rows, columns = x.shape
    below, beside = -(-rows // block[0]), -(-columns // block[1])
    bits = np.zeros((rows, columns), np.uint8)
    stored = np.zeros((below, beside), np.asarray(rule(np.float32(1))[1]).dtype)
    for i in range(below):
        for j in range(beside):
            part = np.s_[
                i * block[0] : min((i + 1) * block[0], rows),
                j * block[1] : min((j + 1) * block[1], columns),
            ]
            scale, stored[i, j] = rule(numerics.amax_of(x[part]))
            bits[part] = numerics.cast_bits(x[part], scale, dtype)
    return bits, stored


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of 8-bit tensors; others as they are."""
    tensor = tensor.detach().cpu()
    return numerics.payload_bits(tensor) if tensor.dtype.itemsize == 1 else tensor.numpy()


def same_bits(results: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> None:
    """Every tensor has the shape, dtype and bytes of its fellow."""
    for result, other in zip(results, others, strict=True):
        assert result.dtype == other.dtype
        np.testing.assert_array_equal(bits_of(result), bits_of(other), strict=True)


def half_steps(x: np.ndarray, scale: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half the distance of the format's neighbours about x, in float64, and float32's own errors.

    `scale` multiplies the payload; it has x's shape.
    """
    quotient = np.abs(x.astype(np.float64)) / scale.astype(np.float64)
    _, exponents = np.frexp(quotient)
    exponents = np.maximum(exponents - 1, SMALLEST_EXPONENT[dtype])
    step = np.ldexp(scale.astype(np.float64), exponents - MANTISSA[dtype])
    return step / 2 + np.abs(x) * 2.0**-22 + 2.0**-149


def finite_matrix(rows: int, columns: int, seed: int, low: int, high: int) -> torch.Tensor:
    """Random float32 of both signs with exponents low to high, some of them zeros."""
    generator = np.random.default_rng(seed)
    shape = (rows, columns)
    fractions = generator.uniform(1, 2, shape).astype(np.float32)
    values = np.ldexp(fractions, generator.integers(low, high, shape))
    signs = generator.choice(np.float32([-1, 1, 1, -1, 0]), shape)
    return torch.from_numpy((values * signs).astype(np.float32))
