"""`block_cast` and `block_dequantize` in Triton's interpreter."""

import pytest
import torch

from quaver import kernels
from quaver.kernels.block_cast import blocks
from tests.kernels.triton.blocks import CASES, amaxes, check_block_cast, matrix, several_tiles
from tests.kernels.triton.per_tensor import check
from tests.samples import FORMATS, normal

CPU = torch.device("cpu")
E4M3, E5M2 = FORMATS

dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])


@dims
@pytest.mark.parametrize("x", CASES + several_tiles(128), ids=str)
def test_every_matrix(x, dim: int) -> None:
    check_block_cast(x, E4M3, dim, dim == 1, 0.0, CPU)
    check_block_cast(x, E5M2, dim, dim == 2, 0.5, CPU)


@dims
@pytest.mark.parametrize("name", ["ragged", "transposed"])
@pytest.mark.parametrize("usages", [(True, False), (False, True), (False, False)])
def test_usages_that_are_not_wanted_are_empty(usages, name: str, dim: int) -> None:
    check_block_cast((name, torch.bfloat16), E4M3, dim, True, 0.0, CPU, usages)


@dims
def test_on_another_device_than_the_current(devices, dim: int) -> None:
    for device in devices:
        check_block_cast(("strided", torch.bfloat16), E4M3, dim, True, 0.0, device)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("power_2", [False, True])
def test_scales_of_every_kind_of_amax(power_2: bool, dtype) -> None:
    x = amaxes(dtype)
    for epsilon in (0.0, 1.0e-40, 1.0):
        check(kernels.block_cast, lambda _, e=epsilon: (x, dtype, 1, power_2, e, True, False), CPU)


@dims
def test_dequantizing_from_any_strides(dim: int) -> None:
    x = normal(140, 200)
    data, scale_inv, _, _ = kernels.block_cast(x, E4M3, dim, False, 0.0, True, False)
    spread = torch.empty(140, 400, dtype=torch.uint8).view(E4M3)[:, ::2].copy_(data)
    turned = scale_inv.t().contiguous().t()
    for payload in (spread, data.t().contiguous().t()):
        check(kernels.block_dequantize, lambda _, p=payload: (p, turned, dim, torch.float16), CPU)


def test_another_block_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="block_dim must be 1"):
        kernels.block_cast(normal(4, 4), E4M3, 3, True, 0.0, True, True)


@pytest.mark.parametrize("name", ["ragged", "transposed", "tiles_of_128"])
def test_scales_that_lie_by_blocks_as_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "runs_triton", lambda kind: True)
    x = (name, torch.bfloat16)
    check_block_cast(x, E4M3, 1, True, 0.0, CPU)
    row, row_scale, col, col_scale = kernels.block_cast(
        matrix(*x, CPU), E4M3, 1, True, 0.0, True, True
    )
    for data, scale in ((row, row_scale), (col, col_scale)):
        assert data.is_contiguous()
        assert scale.t().is_contiguous()
