"""The activations in Triton's interpreter."""

import pytest
import torch

from quaver import kernels
from quaver.kernels.activation import triton, triton_backward
from quaver.kernels.common.triton_tiles import Tile
from tests.kernels.test_activation import ACTIVATIONS, OPERATORS, arguments
from tests.kernels.test_operators import assert_same_bytes, described
from tests.kernels.triton.fused import check_activation, check_activation_cast
from tests.samples import NAMES, sample

CPU = torch.device("cpu")


FEW = ("empty", "ragged", "transposed", "spread")
samples = pytest.mark.parametrize("kinds", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)])


@samples
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_samples(name: str, kinds: tuple[str, ...]) -> None:
    check_activation(name, torch.float32, CPU, kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "clamped_swiglu"])
def test_other_dtypes(name: str, dtype) -> None:
    check_activation(name, dtype, CPU, FEW)


@samples
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_samples_cast(name: str, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In small tiles, so that a small matrix has several in each direction."""
    monkeypatch.setattr(triton, "TILE", Tile(8, 16, 1))
    monkeypatch.setattr(triton, "TRANSPOSING_TILE", Tile(8, 16, 1))
    monkeypatch.setattr(triton_backward, "CAST_TILE", Tile(8, 16, 1))
    check_activation_cast(name, torch.float32, CPU, kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "clamped_swiglu"])
def test_gated_gradients_are_rounded_before_the_cast(name: str, dtype) -> None:
    gated = name != "gelu"
    x = sample("spread" if gated else "ragged", torch.float32)[:, :32].clamp(-50, 50).to(dtype)
    grad = sample("ragged")[:7, : x.shape[1] // (2 if gated else 1)].to(dtype)
    x = x[:7]
    result = torch.full(x.shape, torch.nan)
    run, rest = triton_backward.activation_backward_cast, (torch.ones(1), None, None, 0)
    run(grad, x, name, 7.0, 1.0, *rest, torch.float8_e5m2, True, result=result)
    wide = triton_backward.activation_backward(grad, x.to(torch.float32), name, 7.0, 1.0)
    assert torch.equal(result, wide.to(dtype).to(torch.float32) if gated else wide)
    check_activation_cast(name, dtype, CPU, ("ragged", "nan_inf"))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["ragged", "empty", "empty_columns"])
def test_through_the_door_on_another_device_than_the_current(name: str, kind: str, devices) -> None:
    """Results that look like the reference's, and the same bits as on the CPU."""
    call = getattr(kernels, name)
    for here, there in zip(
        arguments(name, sample(kind)), arguments(name, sample(kind, device=devices[1])), strict=True
    ):
        got, expected = (r if isinstance(r, tuple) else (r,) for r in (call(*there), call(*here)))
        assert all(t.device == devices[1] for t in got)
        assert described(got) == described(expected)
        assert_same_bytes(tuple(t.cpu() for t in got), expected)
