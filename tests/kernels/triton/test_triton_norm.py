"""The norms in Triton's interpreter."""

import pytest
import torch

from quaver.kernels import norm, norm_backward, norm_cast
from quaver.kernels.common import triton_transpose
from quaver.kernels.norm import triton, triton_backward
from tests.kernels.fused_numerics import matrix
from tests.kernels.test_norm import arguments, cases, norm_case
from tests.kernels.test_operators import assert_same_bytes, described
from tests.kernels.triton.fused import check_norm, check_norm_cast
from tests.samples import DTYPES, NAMES, normal, sample

CPU = torch.device("cpu")


FEW = ("ragged", "transposed", "expanded", "nan_inf")
samples = pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)])


@samples
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(dtype, names: tuple[str, ...]) -> None:
    for case in cases(dtype, names):
        check_norm(case, CPU)


@samples
def test_samples_cast(names: tuple[str, ...]) -> None:
    for case in cases(torch.float32, names):
        check_norm_cast(case, CPU)


@pytest.fixture
def _short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 30 and more columns count as long, and several programs share the rows."""
    monkeypatch.setattr(triton, "LONGEST", 16)
    monkeypatch.setattr(triton_backward, "LONGEST", 16)
    monkeypatch.setattr(triton_backward, "PROGRAMS", 3)
    monkeypatch.setattr(triton_backward, "PIECE_ROWS", 2)
    monkeypatch.setattr(triton_backward, "PIECE_COLUMNS", 16)
    monkeypatch.setattr(triton_transpose, "TILE", 16)


@pytest.mark.usefixtures("_short_rows")
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("name", ["ragged", pytest.param("strided", marks=pytest.mark.slow)])
def test_rows_longer_than_a_program(name: str, kind: str) -> None:
    case = norm_case(matrix(sample(name))[:5], kind, centered=True)
    check_norm(case, CPU)
    check_norm_cast(case, CPU)


def test_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backward, "PROGRAMS", 3)
    monkeypatch.setattr(triton_backward, "VALUES_A_PROGRAM", 64)
    check_norm(norm_case(normal(29, 30), "layer"), CPU)
    check_norm(norm_case(normal(29, 30), "rms", centered=True), CPU)


@pytest.mark.parametrize("name", ["norm", "norm_backward", "norm_cast"])
@pytest.mark.parametrize("kind", ["ragged", "empty", "empty_columns"])
def test_through_the_door_on_another_device_than_the_current(name: str, kind: str, devices) -> None:
    """Results that look like the reference's, and the same bits as on the CPU."""
    call = {"norm": norm, "norm_backward": norm_backward, "norm_cast": norm_cast}[name]
    for here, there in zip(
        arguments(name, sample(kind)), arguments(name, sample(kind, device=devices[1])), strict=True
    ):
        got, expected = call(*there), call(*here)
        assert all(t.device == devices[1] for t in got)
        assert described(got) == described(getattr(torch.ops.quaver, name)(*here))
        assert_same_bytes(tuple(t.cpu() for t in got), expected)
