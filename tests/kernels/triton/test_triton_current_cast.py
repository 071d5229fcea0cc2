"""`current_cast` in Triton's interpreter."""

import pytest
import torch

from quaver.kernels import current_cast, use_implementation
from quaver.kernels.common import triton_tiles
from quaver.kernels.common.triton_tiles import Tile
from tests.kernels.triton.per_tensor import MATRICES, PAIRS, assert_same, check_current_cast
from tests.samples import sample

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(("source", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_every_matrix(name: str, source, dtype) -> None:
    check_current_cast(name, source, dtype, CPU)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_current_cast("ragged", torch.bfloat16, E4M3, device)


@pytest.mark.parametrize("name", ["ragged", "transposed", "strided", "nan_inf"])
def test_an_amax_over_many_tiles_and_few_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "AMAX_TILE", Tile(2, 4, 1))
    monkeypatch.setattr(triton_tiles, "AMAX_FLAT_TILE", Tile(1, 8, 1))
    monkeypatch.setattr(triton_tiles, "PARTS", 3)
    x = sample(name).abs().nan_to_num(posinf=9.0)
    for row in range(0, x.shape[0], 3):  # the largest value in one tile, then in another
        x[row, -1] += 100.0
        results = []
        for version in ("reference", "triton"):
            with use_implementation(version):
                results.append(list(current_cast(x, E4M3, False, 0.0, None, True)))
        assert_same(*results)


@pytest.mark.parametrize("amax", [0.0, torch.inf, torch.nan, 1.0e-44, 3.0e38, 0.1])
@pytest.mark.parametrize("power_2", [False, True])
def test_amaxes_at_the_ends_of_float32(amax: float, power_2: bool) -> None:
    x = sample("spread")
    for epsilon in (0.0, 0.2):
        results = []
        for version in ("reference", "triton"):
            with use_implementation(version):
                given = torch.tensor([amax])
                results.append(list(current_cast(x, E4M3, power_2, epsilon, given, False)))
        assert_same(*results)
