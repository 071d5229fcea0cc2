"""`mx_cast` and `mx_dequantize` in Triton's interpreter."""

import pytest
import torch

from quaver import kernels
from tests.kernels.triton.blocks import CASES, amaxes, check_mx_cast, several_tiles
from tests.kernels.triton.per_tensor import check
from tests.samples import DTYPES, FORMATS

CPU = torch.device("cpu")
E4M3, E5M2 = FORMATS

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)


@pytest.mark.parametrize("x", CASES + several_tiles(64), ids=str)
def test_every_matrix(x) -> None:
    for dtype in FORMATS:
        check_mx_cast(x, dtype, CPU)


@pytest.mark.parametrize("usages", [(True, False), (False, True), (False, False)])
def test_usages_that_are_not_wanted_are_empty(usages) -> None:
    check_mx_cast(("ragged", torch.bfloat16), E4M3, CPU, usages)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_mx_cast(("ragged", torch.bfloat16), E4M3, device)


@formats
def test_scales_of_every_kind_of_amax(dtype) -> None:
    check(kernels.mx_cast, lambda _: (amaxes(dtype), dtype, True, False), CPU)


@formats
def test_every_byte_under_scales_of_every_kind(dtype) -> None:
    kinds = torch.tensor([0, 1, 2, 100, 127, 128, 253, 254, 255]).to(torch.uint8)
    data = torch.arange(256).to(torch.uint8).view(8, 32).repeat(1, len(kinds)).view(dtype)
    scale = kinds.repeat(8, 1).view(torch.float8_e8m0fnu)
    for source in DTYPES:
        check(kernels.mx_dequantize, lambda _, s=source: (data, scale, s), CPU)
