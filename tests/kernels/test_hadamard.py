"""The random Hadamard transform: bit for bit, orthogonal, and neutral in a product of two."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver.kernels.hadamard.op import hadamard
from quaver.kernels.nvfp4_cast.op import nvfp4_cast, nvfp4_dequantize
from tests.kernels import numerics
from tests.samples import DTYPES, NAMES, normal, sample

SIGNS = np.float32([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])

inputs = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def matrix() -> np.ndarray:
    """diag(SIGNS) @ H / 4 in float64, H by the number of common bits of row and column."""
    common = np.arange(16)[:, None] & np.arange(16)
    parity = np.array([[bin(c).count("1") % 2 for c in row] for row in common])
    return SIGNS[:, None] * np.where(parity, -1.0, 1.0) / 4


def transformed(x: np.ndarray) -> np.ndarray:
    """The same butterflies, one pair at a time."""
    rows, columns = x.shape
    y = np.zeros((rows, -(-columns // 16) * 16), np.float32)
    y[:, :columns] = x
    y *= np.tile(SIGNS, y.shape[1] // 16)
    with np.errstate(all="ignore"):
        for stride in (1, 2, 4, 8):
            for i in range(y.shape[1]):
                if i % (2 * stride) < stride:
                    a, b = y[:, i].copy(), y[:, i + stride].copy()
                    y[:, i], y[:, i + stride] = a + b, a - b
        return y * np.float32(0.25)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.numel() else x


@inputs
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_transformed_bit_for_bit(name: str, dtype) -> None:
    x = flat(sample(name, dtype))
    y = hadamard(x)
    expected = transformed(numerics.to_float32(x))
    assert y.dtype == torch.float32
    assert y.is_contiguous()
    assert y.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(y.numpy()), nan)
    bits, wanted = (np.where(nan, 0, a.view(np.int32)) for a in (y.numpy(), expected))
    np.testing.assert_array_equal(bits, wanted)


def test_it_is_the_documented_matrix_and_orthogonal_to_float32_accuracy() -> None:
    unit = hadamard(torch.eye(16))
    np.testing.assert_array_equal(unit.numpy(), matrix())
    assert torch.equal(unit @ unit.T, torch.eye(16))
    x = normal(200, 64, name="orthogonal")
    back = hadamard(x).double().unflatten(1, (4, 16)) @ unit.T.double()
    error = (back.flatten(1) - x).norm() / x.norm()
    assert error < 4 * torch.finfo(torch.float32).eps
    lengths = hadamard(x).double().norm(dim=1) / x.double().norm(dim=1)
    assert (lengths - 1).abs().max() < 4 * torch.finfo(torch.float32).eps


def test_an_outlier_is_spread_over_its_block_only() -> None:
    x = torch.zeros(3, 40)
    x[1, 20] = 100.0
    y = hadamard(x)
    assert y.shape == (3, 48)
    assert (y[1, 16:32].abs() == 25.0).all()
    y[1, 16:32] = 0.0
    assert not y.any()


def rounding_bound(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x through NVFP4 and back, and the most by which each element may differ, in float64."""
    data, scale, _, _, scale_inv = nvfp4_cast(x, False, False, 0, 0, True, False)
    y = nvfp4_dequantize(data, scale, scale_inv, False, x.shape[1], torch.float32).double()
    unit = (scale.double() * scale_inv.double()).repeat_interleave(16, 1)[:, : x.shape[1]]
    # Half of E2M1's widest step, which is 2; what saturates lies less than that above 6, since
    # scales that are not subnormal are rounded by 1/16 at most.
    assert (scale.double() >= 2.0**-6).all()
    return y, unit * (1 + 1e-5)


@pytest.mark.parametrize("tokens", [160, 50])
def test_a_product_of_two_transformed_operands_is_the_untransformed_one(tokens: int) -> None:
    a, b = normal(24, tokens, name="a"), normal(40, tokens, name="b")
    exact = a.double() @ b.double().T
    left, right = hadamard(a), hadamard(b)
    assert left.shape[1] == right.shape[1] == -(-tokens // 16) * 16
    torch.testing.assert_close(left.double() @ right.double().T, exact, rtol=1e-5, atol=1e-5)

    (got_left, bound_left), (got_right, bound_right) = rounding_bound(left), rounding_bound(right)
    bound = left.double().abs() @ bound_right.T + bound_left @ right.double().abs().T
    bound += bound_left @ bound_right.T
    error = (got_left @ got_right.T - exact).abs()
    assert (error <= bound).all()
    # That bound is the worst case. Errors of elements cancel: an eighth or so of the whole is lost,
    # and all of it where only one of the operands is transformed.
    assert 0.05 < error.norm() / exact.norm() < 0.2
    mixed = a.double() @ got_right[:, :tokens].T
    assert (mixed - exact).norm() / exact.norm() > 1


@pytest.mark.parametrize("kind", ["ragged", "transposed", "strided"])
def test_opcheck(kind: str) -> None:
    torch.library.opcheck(torch.ops.quaver.hadamard.default, (sample(kind),))


@pytest.mark.parametrize("name", NAMES)
def test_fake_and_meta_results_look_like_real_ones(name: str) -> None:
    x = flat(sample(name))
    real = hadamard(x)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = torch.ops.quaver.hadamard(mode.from_tensor(x))
    for other in (fake, hadamard(x.to("meta")), torch.ops.quaver.hadamard(x.to("meta"))):
        assert (other.shape, other.dtype, other.stride()) == (real.shape, real.dtype, real.stride())
    assert hadamard(x.to("meta")).device.type == "meta"


def test_results_on_a_device_equal_those_on_the_cpu(devices) -> None:
    for name in NAMES:
        here = hadamard(flat(sample(name)))
        there = hadamard(flat(sample(name, device=devices[1])))
        assert there.device == devices[1]
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0, equal_nan=True)
