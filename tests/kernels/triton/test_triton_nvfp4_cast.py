"""`nvfp4_cast` and `nvfp4_dequantize` in Triton's interpreter."""

import pytest
import torch

from quaver import kernels
from tests.kernels.triton.blocks import SAMPLES, amaxes, check_nvfp4_cast, matrix, several_tiles
from tests.kernels.triton.per_tensor import check
from tests.samples import DTYPES

CPU = torch.device("cpu")
NUMBERS = (-7, 2**33 + 5, None)
"""A seed and an offset that fill both words, no step."""

squares = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1x16", "16x16"])


@pytest.mark.parametrize("name", SAMPLES)
def test_every_matrix(name: str) -> None:
    check_nvfp4_cast((name, torch.float32), False, None, CPU)
    check_nvfp4_cast((name, torch.bfloat16), True, None, CPU)
    check_nvfp4_cast((name, torch.float16), False, NUMBERS, CPU)


@squares
@pytest.mark.parametrize("x", several_tiles(64), ids=str)
def test_several_tiles(x, two_dimensional: bool) -> None:
    check_nvfp4_cast(x, two_dimensional, None, CPU)


@squares
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_dtypes(source, two_dimensional: bool) -> None:
    for name in ("nan_inf", "subnormal", "spread"):
        check_nvfp4_cast((name, source), two_dimensional, None, CPU)


@pytest.mark.parametrize("name", ["ragged", "transposed", "tiles_of_64"])
@pytest.mark.parametrize(
    "numbers", [(0, 0, None), (2**63 - 1, 2**31, 3), (1, -1, 2**40)], ids=["0", "large", "wraps"]
)
def test_stochastic_rounding(numbers, name: str) -> None:
    """Rows whose length 4 divides, and does not."""
    check_nvfp4_cast((name, torch.bfloat16), name == "tiles_of_64", numbers, CPU)


@squares
@pytest.mark.parametrize("usages", [(True, False), (False, True), (False, False)])
def test_usages_that_are_not_wanted_are_empty(usages, two_dimensional: bool) -> None:
    check_nvfp4_cast(("transposed", torch.bfloat16), two_dimensional, NUMBERS, CPU, usages)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_nvfp4_cast(("ragged", torch.bfloat16), True, (5, 6, 7), device)


def test_global_scales_of_every_kind_of_amax() -> None:
    for amax in amaxes(torch.float8_e4m3fn)[::97]:
        x = amax * torch.tensor([[1.0, -0.5, 0.01, 0.0]])
        check(kernels.nvfp4_cast, lambda _, x=x: (x, False, False, 0, 0, True, False), CPU)


def test_every_byte_from_any_strides() -> None:
    data = torch.arange(256).to(torch.uint8).view(16, 16).repeat(1, 6)[:, 5:69]
    kinds = torch.tensor([0.0, 2.0**-9, 1.5, 448.0, -1.0, torch.nan, 17.0])
    scale = kinds.repeat(19)[:128].view(8, 16).t().to(torch.float8_e4m3fn)
    factor = torch.tensor([0.3])
    for source in DTYPES:
        for columns in (127, 128):
            check(
                kernels.nvfp4_dequantize,
                lambda _, c=columns, s=source: (data, scale, factor, False, c, s),
                CPU,
            )


def test_stochastic_rounding_is_not_that_to_nearest() -> None:
    x = matrix("ragged", torch.float32, CPU)
    drawn = kernels.nvfp4_cast(x, False, True, 1, 2, True, False)[0]
    assert (drawn != kernels.nvfp4_cast(x, False, False, 1, 2, True, False)[0]).any()
    assert (drawn != kernels.nvfp4_cast(x, False, True, 1, 3, True, False)[0]).any()
