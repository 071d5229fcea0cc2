"""`cast` and `cast_grad` in Triton's interpreter."""

import pytest
import torch

from quaver.kernels import cast, cast_grad, use_implementation
from quaver.kernels.common import triton_cast
from quaver.kernels.common.triton_tiles import Tile
from quaver.kernels.door import launches
from tests.kernels.triton.per_tensor import (
    MATRICES,
    PAIRS,
    assert_same,
    assert_sums,
    check_cast,
    check_cast_grad,
)
from tests.samples import NAMES, normal, sample

CPU = torch.device("cpu")


@pytest.mark.parametrize(("source", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_cast_of_every_sample(name: str, source, dtype) -> None:
    check_cast(name, source, dtype, CPU)


@pytest.mark.parametrize(("source", "dtype"), PAIRS[1:3], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_cast_grad_of_every_matrix(name: str, source, dtype) -> None:
    check_cast_grad(name, source, dtype, CPU)


@pytest.mark.parametrize("name", ["ragged", "transposed", "three_dims"])
def test_on_another_device_than_the_current(name: str, devices) -> None:
    for device in devices:
        check_cast(name, torch.bfloat16, torch.float8_e4m3fn, device)
        if name in MATRICES:
            check_cast_grad(name, torch.bfloat16, torch.float8_e5m2, device)


@pytest.mark.parametrize(("source", "dtype"), [PAIRS[0], PAIRS[3]], ids=str)
def test_every_16_bit_input(source, dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    results = []
    for version in ("reference", "triton"):
        with use_implementation(version):
            results.append(list(cast(x, torch.tensor([3.7]), None, None, 0, dtype, False)))
    assert_same(*results)


@pytest.mark.parametrize("columnwise", [False, True])
def test_many_tiles(columnwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that a small matrix has several in each direction and partial amaxes."""
    monkeypatch.setattr(triton_cast, "BOTH_TILE", Tile(4, 8, 1))
    monkeypatch.setattr(triton_cast, "ROWWISE_TILE", Tile(2, 16, 1))
    for name in ("ragged", "offset", "strided"):
        x = sample(name, torch.bfloat16)
        results = []
        for version in ("reference", "triton"):
            amax, ready = torch.zeros(1), torch.zeros(1)
            with use_implementation(version):
                made = cast(x, torch.ones(1), amax, ready, 0, torch.float8_e4m3fn, columnwise)
            results.append([*made, amax])
        assert_same(*results)


def test_sums_over_many_tiles_are_the_same_twice() -> None:
    x = normal(700, 5, dtype=torch.bfloat16)
    one = torch.ones(1)
    first, second = (
        cast_grad(x, one, None, None, 0, torch.float8_e5m2, False)[3] for _ in range(2)
    )
    assert_sums(x, first)
    assert torch.equal(first, second)


def test_the_launch_passes_the_door() -> None:
    with launches() as log:
        cast(normal(2, 3), torch.ones(1), None, None, 0, torch.float8_e4m3fn, False)
    assert [launch.kernel for launch in log] == ["cast"]
