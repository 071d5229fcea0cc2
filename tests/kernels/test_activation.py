"""Activations: the references against float64, and the operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from quaver import kernels
from quaver.errors import DeviceMismatchError, QuaverError
from quaver.kernels import (
    activation,
    activation_backward,
    activation_backward_cast,
    activation_cast,
    cast,
    is_gated,
)
from tests.kernels.fused_numerics import (
    LARGEST,
    Bounded,
    U,
    assert_within,
    expected_activation,
    expected_slope,
    matrix,
)
from tests.kernels.test_operators import TESTS, assert_same_bytes, described
from tests.samples import DTYPES, FORMATS, NAMES, normal, sample

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
ACTIVATIONS = (*PLAIN, *GATED)
LIMIT, ALPHA = 1.25, 1.5
E4M3, E5M2 = FORMATS

every = pytest.mark.parametrize("name", ACTIVATIONS)


def inputs(
    name: str, dtype: torch.dtype, kinds: tuple[str, ...] = NAMES
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The samples, of even width where the activation is gated, each with a gradient of y."""
    for kind in kinds:
        x = matrix(sample(kind, dtype))
        if x.isnan().any():  # has a test of its own
            continue
        if name in ("srelu", "sreglu") and x.numel() and x.abs().max() > LARGEST:
            continue  # twice a value may overflow before it is multiplied
        if is_gated(name):
            x = x[:, : x.shape[1] // 2 * 2]
        width = x.shape[1] // 2 if is_gated(name) else x.shape[1]
        yield x, normal(x.shape[0], width, name="grad", dtype=torch.bfloat16)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_s_activation_is_within_float32_s_rounding(name: str, dtype) -> None:
    for x, grad in inputs(name, dtype):
        for out in (torch.float32, torch.float16):
            y = activation(x, name, out, LIMIT, ALPHA)
            assert (y.dtype, y.shape) == (out, grad.shape)
            assert y.is_contiguous()
            assert_within(y, expected_activation(x, name, LIMIT, ALPHA))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_s_gradient_is_within_float32_s_rounding(name: str, dtype) -> None:
    for x, grad in inputs(name, dtype):
        dx = activation_backward(grad, x, name, LIMIT, ALPHA)
        assert (dx.dtype, dx.shape) == (dtype, x.shape)
        assert dx.is_contiguous()
        assert_within(dx, expected_slope(grad, x, name, LIMIT, ALPHA))


@every
def test_a_wide_range_is_within_float32_s_rounding(name: str) -> None:
    """From where the nonlinearity is flat on one side to where it is on the other."""
    gate = torch.linspace(-30, 30, 1201)[None, :]
    x = torch.cat([gate, gate.flip(1) / 7], 1) if is_gated(name) else gate
    for limit in (7.0, 40.0):
        y = activation(x, name, torch.float32, limit)
        assert_within(y, expected_activation(x, name, limit, 1.702))
        dx = activation_backward(torch.ones_like(y), x, name, limit)
        assert_within(dx, expected_slope(torch.ones_like(y), x, name, limit, 1.702))


def test_the_first_half_is_the_gate() -> None:
    x = torch.tensor([[-3.0, 2.0]])
    assert activation(x, "reglu", torch.float32).item() == 0.0
    assert activation(x.flip(1), "reglu", torch.float32).item() == -6.0


def test_the_clamped_swiglu_is_gpt_oss_s() -> None:
    """Both halves clamped, the gate from above only; 1 added to the other."""
    x = torch.tensor([[9.0, -9.0, 1.0, 8.0, -8.0, 0.5]])
    gate, linear = torch.tensor([7.0, -9.0, 1.0]), torch.tensor([7.0, -7.0, 0.5])
    expected = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
    torch.testing.assert_close(activation(x, "clamped_swiglu", torch.float32)[0], expected)
    dx = activation_backward(torch.ones(1, 3), x, "clamped_swiglu")[0]
    assert dx[[0, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert (dx[[1, 2, 5]] != 0).all()
    on_the_limit = torch.tensor([[7.0, -7.0]])
    assert (activation_backward(torch.ones(1, 1), on_the_limit, "clamped_swiglu") != 0).all()


@every
def test_nan_stays_and_huge_values_have_slopes(name: str) -> None:
    x = torch.tensor([[torch.nan, 1e30], [1.0, -1e30]])
    x = torch.cat([x, torch.ones(2, 2)], 1) if is_gated(name) else x
    y = activation(x, name, torch.float32)
    assert y[0, 0].isnan()
    assert y[1].isfinite().all()
    dx = activation_backward(torch.ones_like(y), x, name)
    assert dx[:, 1].isfinite().all()


@every
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_cast_is_that_of_the_float32_result(name: str, dtype) -> None:
    scale = torch.tensor([2.0, 3.7, 4.0])
    for x, grad in inputs(name, torch.float32):
        y = activation(x, name, torch.float32, LIMIT, ALPHA)
        dx = activation_backward(grad, x, name, LIMIT, ALPHA)
        for ready in (None, torch.zeros(3), torch.ones(3)):
            rest = (ready, 1, dtype, True, 1)
            for run, operands, result in (
                (activation_cast, (x,), y),
                (activation_backward_cast, (grad, x), dx),
            ):
                got_history, history = torch.zeros(4, 3), torch.zeros(4, 3)
                got = run(*operands, name, LIMIT, ALPHA, scale, got_history, *rest)
                assert_same_bytes(got[:3], cast(result, scale, history, *rest))
                assert torch.equal(got_history, history)
        assert_sums(got[3], dx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every
def test_gated_gradients_are_rounded_before_the_cast_and_others_are_not(name: str, dtype) -> None:
    for x, grad in inputs(name, dtype):
        wide = activation_backward(grad, x.to(torch.float32), name, LIMIT, ALPHA)
        dx = wide.to(dtype).to(torch.float32) if is_gated(name) else wide
        rest = (torch.ones(1), None, torch.zeros(1), 0, E5M2, True, 0)
        got = activation_backward_cast(grad, x, name, LIMIT, ALPHA, *rest)
        assert_same_bytes(got[:3], cast(dx, *rest))
        assert_sums(got[3], dx)


def assert_sums(sums: torch.Tensor, dx: torch.Tensor) -> None:
    """Float32 sums over the rows, added in whatever order."""
    wide = dx.cpu().double()
    assert sums.dtype == torch.float32
    bound = (dx.shape[0] + 1) * U * wide.abs().sum(0)
    within_range = bound < 1e30  # a sum may overflow in one order and not in another
    expected = Bounded(wide.sum(0)[within_range], bound[within_range])
    assert_within(sums[within_range.to(sums.device)], expected)


@pytest.mark.parametrize(
    ("name", "x", "said"),
    [
        ("mish", normal(2, 4), "activation must be one of clamped_swiglu, geglu"),
        ("gelu", normal(4), "x must have 2 dimensions"),
        ("swiglu", normal(2, 5), "must be even, not 5"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, x: torch.Tensor, said: str) -> None:
    with pytest.raises(QuaverError, match=said):
        activation(x, name, torch.float32)
    with pytest.raises(QuaverError, match=said):
        activation_backward(x, x, name)


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(QuaverError, match=r"grad must have the shape \(2, 3\) of swiglu of x"):
        activation_backward(normal(2, 6), normal(2, 6), "swiglu")


def arguments(operator: str, x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Arguments of an operator, made from the matrix x."""
    scale, history = torch.ones(3, device=x.device), torch.zeros(4, 3, device=x.device)
    rest = (scale, history, scale * 0, 2, E5M2, True, 1)
    found: list[tuple[Any, ...]] = []
    for name in ("gelu", "clamped_swiglu"):
        grad = x if name == "gelu" else x[:, x.shape[1] // 2 :]
        found.append(
            {
                "activation": (x, name, torch.bfloat16, 2.0, 1.5),
                "activation_backward": (grad, x, name, 2.0, 1.5),
                "activation_cast": (x, name, 2.0, 1.5, *rest),
                "activation_backward_cast": (grad, x, name, 2.0, 1.5, *rest),
            }[operator]
        )
    return found


OPERATORS = ("activation", "activation_backward", "activation_cast", "activation_backward_cast")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["ragged", "transposed", "empty"])
def test_the_operators(name: str, kind: str, devices) -> None:
    """Opcheck, fakes, another device than the current, and the function that the code calls."""
    operator, call = getattr(torch.ops.quaver, name).default, getattr(kernels, name)
    for args in arguments(name, sample(kind)):
        if kind == "ragged":  # the slowest part; strides and emptiness are compared below
            torch.library.opcheck(operator, args, test_utils=(*TESTS, "test_autograd_registration"))
        real = operator(*args)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            assert described(operator(*fakes)) == described(real)
        assert_same_bytes(call(*args), real)
        there = call(*tree_map_only(torch.Tensor, lambda t: t.to(devices[1]), args))
        moved = tree_map_only(torch.Tensor, torch.Tensor.cpu, there)
        assert_same_bytes(moved, real)
        assert all(t.device == devices[1] for t in (there if isinstance(there, tuple) else [there]))


def test_operands_on_two_devices_are_refused(devices) -> None:
    x = normal(3, 4, device=devices[0])
    with pytest.raises(DeviceMismatchError, match="grad"):
        activation_backward(x.to(devices[1]), x, "gelu")
