"""Norms and activations on a GPU: within their bounds, casts bit for bit, sums reproducible."""

import pytest
import torch

import quaver as qv
from quaver.kernels import activation_backward_cast, activation_cast, norm, norm_backward, norm_cast
from tests.kernels.fused_numerics import matrix
from tests.kernels.test_activation import ACTIVATIONS, LIMIT
from tests.kernels.test_norm import norm_case
from tests.kernels.test_operators import assert_same_bytes
from tests.kernels.triton.fused import (
    check_activation,
    check_activation_cast,
    check_norm,
    check_norm_cast,
)
from tests.samples import DTYPES, normal, sample

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS_BEYOND_32_BITS = 2**31 // 4096 + 8


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


# Few cases: nearly each is compiled for itself, and the interpreter runs all of them.
NORMS = [
    ("ragged", torch.bfloat16, "layer"),
    ("transposed", torch.float32, "plain_rms"),
    ("strided", torch.float16, "rms"),
    ("nan_inf", torch.float32, "no_bias"),
]


@pytest.mark.parametrize(("name", "dtype", "kind"), NORMS)
def test_samples_normalized(cuda, name: str, dtype, kind: str) -> None:
    case = norm_case(matrix(sample(name, dtype)), kind, centered=True)
    check_norm(case, cuda)
    check_norm_cast(case, cuda)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((3000, 64), "rms"), ((300, 8192), "layer"), ((70, 16384), "rms"), ((40, 40000), "layer")],
)
def test_short_and_long_rows(cuda, shape: tuple[int, int], kind: str) -> None:
    """Several rows a program, one, and one in pieces."""
    case = norm_case(normal(*shape, dtype=torch.bfloat16), kind, centered=True)
    check_norm(case, cuda)
    check_norm_cast(case, cuda)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_samples_activated(cuda, name: str) -> None:
    dtype = DTYPES[ACTIVATIONS.index(name) % 3]
    check_activation(name, dtype, cuda, ("spread", "subnormal"))
    check_activation_cast(name, dtype, cuda, ("ragged", "transposed"))


def test_large_activations_are_cast_alike_with_and_without_a_transpose(cuda) -> None:
    """Different tiles, the same values; the transpose is one; sums twice the same bits."""
    x = normal(1000, 2 * 1536, dtype=torch.bfloat16).to(cuda)
    grad = normal(1000, 1536, dtype=torch.bfloat16, name="grad").to(cuda)
    scale = torch.full((1,), 3.7, device=cuda)
    for call, args in (
        (activation_cast, (x, "swiglu", LIMIT, 1.0)),
        (activation_backward_cast, (grad, x, "swiglu", LIMIT, 1.0)),
    ):
        once = call(*args, scale, None, None, 0, E5M2, True)
        again = call(*args, scale, None, None, 0, E5M2, True)
        without = call(*args, scale, None, None, 0, E5M2, False)
        assert_same_bytes(once, again)
        assert_same_bytes(once[0], without[0])
        assert_same_bytes(once[1], once[0].t())


def test_memory_past_32_bits(cuda) -> None:
    """The last rows of a matrix of more than 2^31 values."""
    row = normal(8, 4096, dtype=torch.bfloat16).to(cuda)
    x = torch.empty(ROWS_BEYOND_32_BITS, 4096, dtype=torch.bfloat16, device=cuda)
    x[-8:] = row
    x[:-8] = 1.0
    scale = torch.full((1,), 3.7, device=cuda)
    case = norm_case(x, "rms")
    small = case._replace(x=row)
    y, _, rstd = norm(*case, torch.bfloat16)
    assert_same_bytes(y[-8:], norm(*small, torch.bfloat16)[0])
    del y
    dx = norm_backward(x, x, case.weight, rstd.new_empty(0), rstd, False, True)[0]
    few = norm_backward(row, row, case.weight, rstd.new_empty(0), rstd[-8:], False, True)[0]
    assert_same_bytes(dx[-8:], few)
    del dx
    data, transposed, *_ = norm_cast(*case, scale, None, None, 0, E4M3, True)
    expected, *_ = norm_cast(*small, scale, None, None, 0, E4M3, True)
    assert_same_bytes(data[-8:], expected)
    assert_same_bytes(transposed[:, -8:], expected.t())
    del data, transposed
    data, transposed, _ = activation_cast(x, "swiglu", 7.0, 1.7, scale, None, None, 0, E4M3, True)
    expected, *_ = activation_cast(row, "swiglu", 7.0, 1.7, scale, None, None, 0, E4M3, True)
    assert_same_bytes(data[-8:], expected)
    assert_same_bytes(transposed[:, -8:], expected.t())


@pytest.mark.parametrize("ours", [qv.LayerNorm, qv.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules_give_their_twins_dtype_under_autocast(cuda, ours, dtype) -> None:
    twin = ours.__base__
    x = normal(6, 64, dtype=dtype).to(cuda).requires_grad_()
    for enabled in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            y = ours(64, device=cuda, dtype=dtype)(x)
            expected = twin(64, device=cuda, dtype=dtype)(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
