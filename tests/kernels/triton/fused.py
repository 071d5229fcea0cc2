"""Checks of the Triton norms and activations, for any device: the interpreter's or a GPU."""

from typing import Any

import torch

from quaver.kernels import cast, is_gated, use_implementation
from quaver.kernels.activation import triton as activations
from quaver.kernels.activation import triton_backward as activation_gradients
from quaver.kernels.norm import triton as norms
from quaver.kernels.norm import triton_backward as norm_gradients
from tests.kernels.fused_numerics import (
    NormCase,
    assert_within,
    expected_activation,
    expected_gradients,
    expected_norm,
    expected_slope,
)
from tests.kernels.test_activation import ALPHA, LIMIT, assert_sums, inputs
from tests.kernels.test_operators import assert_same_bytes
from tests.samples import FORMATS, NAMES, normal

SCALES = (2.0, 3.7, 4.0)
READY = (None, 0.0, 1.0)


def check_norm(case: NormCase, device: torch.device) -> None:
    """Y, the statistics and the gradients, within their bounds; two runs give the same bits."""
    there = case.to(device)
    expected, (rows, columns) = expected_norm(case), case.x.shape
    for out in (torch.float32, torch.bfloat16):
        y, mean, rstd = norms.norm(*there, out)
        assert (y.dtype, y.device) == (out, device)
        assert y.is_contiguous()
        assert_within(y, expected)
    assert (mean.shape, rstd.shape) == ((0 if case.rms else rows,), (rows,))
    grad = normal(columns, rows, name="grad", dtype=torch.bfloat16).t()
    args = (there.x, there.weight, mean, rstd, case.zero_centered, case.rms)
    got = norm_gradients.norm_backward(grad.to(device), *args)
    assert_same_bytes(got, norm_gradients.norm_backward(grad.to(device), *args))
    assert got[0].dtype == case.x.dtype
    for ours, theirs in zip(got, expected_gradients(case, grad), strict=True):
        if theirs is not None:
            assert_within(ours, theirs)
        elif not case.rms or case.weight is None:
            assert ours.numel() == (0 if case.weight is None else columns)


def check_norm_cast(case: NormCase, device: torch.device) -> None:
    """The payload is the cast of the kernel's own float32 result, which is within its bound."""
    there, expected = case.to(device), expected_norm(case)
    _, mean, rstd = norms.norm(*there, torch.float32)
    for ready, dtype in zip(READY, (*FORMATS, FORMATS[0]), strict=True):
        result = torch.full(case.x.shape, torch.nan, device=device)
        got = _run_cast(norms.norm_cast, tuple(there), result, ready, dtype)
        assert_within(result, expected)
        assert_same_bytes(got[3:], (mean, rstd))


def check_activation(
    name: str, dtype: torch.dtype, device: torch.device, kinds: tuple[str, ...] = NAMES
) -> None:
    """Y and dx within their bounds."""
    for x, grad in inputs(name, dtype, kinds):
        there = _moved(x, device)
        y = activations.activation(there, name, dtype, LIMIT, ALPHA)
        assert (y.dtype, y.device, y.shape) == (dtype, device, grad.shape)
        assert_within(y, expected_activation(x, name, LIMIT, ALPHA))
        dx = activation_gradients.activation_backward(grad.to(device), there, name, LIMIT, ALPHA)
        assert (dx.dtype, dx.device, dx.shape) == (dtype, device, x.shape)
        assert_within(dx, expected_slope(grad, x, name, LIMIT, ALPHA))


def check_activation_cast(
    name: str, dtype: torch.dtype, device: torch.device, kinds: tuple[str, ...] = NAMES
) -> None:
    """The payloads are the casts of the kernels' own float32 results; the sums those of dx.

    Gradients of gated activations are rounded to x's dtype first.
    """
    for i, (x, grad) in enumerate(inputs(name, dtype, kinds)):
        there, g = _moved(x, device), grad.to(device)
        ready, fp8 = READY[i % 3], FORMATS[i % 2]
        result = torch.full(grad.shape, torch.nan, device=device)
        args = (there, name, LIMIT, ALPHA)
        _run_cast(activations.activation_cast, args, result, ready, fp8)
        assert_within(result, expected_activation(x, name, LIMIT, ALPHA))
        result = torch.full(x.shape, torch.nan, device=device)
        run = activation_gradients.activation_backward_cast
        sums = _run_cast(run, (g, *args), result, ready, fp8)[3]
        rounded = result.to(dtype if is_gated(name) else torch.float32)
        assert torch.equal(rounded.to(torch.float32).nan_to_num(), result.nan_to_num())
        assert_within(rounded, expected_slope(grad, x, name, LIMIT, ALPHA))
        assert_sums(sums, result)
        assert_same_bytes(sums, _run_cast(run, (g, *args), result, ready, fp8)[3])


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """X on a device, with its strides."""
    if x.device == device or 0 in x.stride():
        return x.to(device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def _run_cast(
    run: Any,
    args: tuple[Any, ...],
    result: torch.Tensor,
    ready: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Run a fused cast, and compare it with the cast of the result that it writes."""
    device = result.device
    scale = torch.tensor(SCALES, device=device)
    known = None if ready is None else torch.full((3,), ready, device=device)
    columnwise = dtype == FORMATS[0]
    history, twin = torch.zeros(4, 3, device=device), torch.zeros(4, 3)
    if result.numel() == 0:
        got = run(*args, scale, history, known, 1, dtype, columnwise, 1)
    else:
        got = run(*args, scale, history, known, 1, dtype, columnwise, 1, result=result)
    here = (None if t is None else t.cpu() for t in (scale, twin, known))
    with use_implementation("reference"):
        expected = cast(result.cpu(), *here, 1, dtype, columnwise, 1)
    assert_same_bytes(tuple(t.cpu() for t in got[:3]), expected)
    assert_same_bytes(history.cpu(), twin)
    found: tuple[torch.Tensor, ...] = got
    return found
