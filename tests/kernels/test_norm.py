"""Layer norm and RMS norm: the references against float64, and the operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from quaver.errors import DeviceMismatchError, QuaverError
from quaver.kernels import cast, norm, norm_backward, norm_cast
from tests.kernels.fused_numerics import (
    LARGEST,
    NormCase,
    assert_within,
    expected_gradients,
    expected_norm,
    matrix,
)
from tests.kernels.test_operators import TESTS, assert_same_bytes, described
from tests.samples import DTYPES, FORMATS, NAMES, normal, sample

KINDS = ("layer", "plain_layer", "no_bias", "rms", "plain_rms")
E4M3 = torch.float8_e4m3fn


def norm_case(x: torch.Tensor, kind: str, centered: bool = False) -> NormCase:
    """A norm of x of a kind, with parameters of its own."""
    columns, device = x.shape[1], x.device
    weight = normal(columns, name="weight", device=device, dtype=torch.bfloat16)
    bias = normal(columns, name="bias", device=device)
    plain = kind.startswith("plain")
    return NormCase(
        x,
        None if plain else weight,
        bias if kind == "layer" else None,
        1e-5,
        centered and not plain,
        kind.endswith("rms"),
    )


def cases(dtype: torch.dtype, names: tuple[str, ...] = NAMES) -> Iterator[NormCase]:
    """Each kind of norm over each sample whose squares float32 can hold."""
    for name in names:
        x = matrix(sample(name, dtype))
        if x.numel() == 0 or x.abs().nan_to_num(posinf=0.0).max() > LARGEST:
            continue
        for kind in KINDS:
            yield norm_case(x, kind, centered=name in ("ragged", "strided"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_is_normalized_within_float32_s_rounding(dtype) -> None:
    for case in cases(dtype):
        for out in (torch.float32, torch.bfloat16):
            y, mean, rstd = norm(*case, out)
            assert (y.dtype, y.shape) == (out, case.x.shape)
            assert y.is_contiguous()
            assert_within(y, expected_norm(case))
            assert mean.shape == (0 if case.rms else case.x.shape[0],)
            assert rstd.shape == (case.x.shape[0],)
            assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_s_gradients_are_within_float32_s_rounding(dtype) -> None:
    for case in cases(dtype):
        _, mean, rstd = norm(*case, dtype)
        grad = normal(*case.x.shape, name="grad", dtype=torch.bfloat16)
        got = norm_backward(grad, case.x, case.weight, mean, rstd, case.zero_centered, case.rms)
        dx, dweight, dbias = expected_gradients(case, grad)
        assert dx is not None
        assert got[0].dtype == dtype
        assert_within(got[0], dx)
        assert got[1].numel() == (0 if dweight is None else case.x.shape[1])
        if dweight is not None:
            assert got[1].dtype == torch.bfloat16
            assert_within(got[1], dweight)
        if dbias is not None:
            assert_within(got[2], dbias)
        assert got[2].numel() == (0 if case.rms or dweight is None else case.x.shape[1])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cast_is_that_of_the_float32_result(kind: str, dtype) -> None:
    for name in NAMES:
        case = norm_case(matrix(sample(name, torch.bfloat16)), kind, centered=True)
        y, mean, rstd = norm(*case, torch.float32)
        for ready in (None, torch.zeros(3), torch.ones(3)):
            got_history, history = torch.zeros(4, 3), torch.zeros(4, 3)
            scale = torch.tensor([2.0, 3.7, 4.0])
            rest = (ready, 1, dtype, True, 1)
            got = norm_cast(*case, scale, got_history, *rest)
            assert_same_bytes(got, (*cast(y, scale, history, *rest), mean, rstd))
            assert torch.equal(got_history, history)


def test_a_zero_centered_gain_is_stored_minus_one() -> None:
    x, weight = normal(4, 30), normal(30, name="weight")
    ours, _, _ = norm(x, weight - 1.0, None, 1e-6, True, True, torch.float32)
    theirs, _, _ = norm(x, (weight - 1.0) + 1.0, None, 1e-6, False, True, torch.float32)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": normal(2, 3, 4)}, "x must have 2 dimensions"),
        ({"weight": normal(5)}, r"weight must have shape \(4,\)"),
        ({"bias": normal(5)}, r"bias must have shape \(4,\)"),
        ({"rms": True}, "RMS norm has no bias"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    case = NormCase(normal(3, 4), normal(4), normal(4), 1e-5, False, False)._replace(**change)
    with pytest.raises(QuaverError, match=said):
        norm(*case, torch.float32)
    if "x" in change or "weight" in change:
        stats = normal(3)
        with pytest.raises(QuaverError, match=said):
            norm_backward(case.x, case.x, case.weight, stats, stats, False, False)
    with pytest.raises(QuaverError, match="grad must have x's shape"):
        norm_backward(normal(2, 4), normal(3, 4), None, normal(3), normal(3), False, False)


def arguments(name: str, x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Arguments of the operator `name`, made from the matrix x."""
    found: list[tuple[Any, ...]] = []
    for kind in ("layer", "rms", "plain_layer"):
        case = norm_case(x, kind)
        stats = normal(x.shape[0], name="stats", device=x.device)
        mean = stats.new_empty(0) if case.rms else stats
        scale, history = torch.ones(3, device=x.device), torch.zeros(4, 3, device=x.device)
        if name == "norm":
            found.append((*case, torch.bfloat16))
        elif name == "norm_backward":
            found.append((x * 2, x, case.weight, mean, stats.abs(), False, case.rms))
        else:
            found.append((*case, scale, history, scale * 0, 2, E4M3, kind == "layer", 1))
    return found


OPERATORS = ("norm", "norm_backward", "norm_cast")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["ragged", "transposed", "empty"])
def test_the_operators(name: str, kind: str, devices) -> None:
    """Opcheck, fakes, another device than the current, and the function that the code calls."""
    operator = getattr(torch.ops.quaver, name).default
    call = {"norm": norm, "norm_backward": norm_backward, "norm_cast": norm_cast}[name]
    for args in arguments(name, sample(kind)):
        if kind == "ragged":  # the slowest part; strides and emptiness are compared below
            torch.library.opcheck(operator, args, test_utils=(*TESTS, "test_autograd_registration"))
        real = operator(*args)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            assert described(operator(*fakes)) == described(real)
        assert_same_bytes(call(*args), real)
        there = call(*tree_map_only(torch.Tensor, lambda t: t.to(devices[1]), args))
        assert all(t.device == devices[1] for t in there)
        assert_same_bytes(tree_map_only(torch.Tensor, torch.Tensor.cpu, there), real)


def test_operands_on_two_devices_are_refused(devices) -> None:
    case = norm_case(normal(3, 4, device=devices[0]), "layer")
    case = case._replace(weight=normal(4, device=devices[1]))
    with pytest.raises(DeviceMismatchError, match="weight"):
        norm(*case, torch.float32)
