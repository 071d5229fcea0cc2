"""`amax` and `dequantize` in Triton's interpreter."""

import pytest
import torch

from quaver.kernels import amax, dequantize
from tests.kernels.triton.per_tensor import PAIRS, check, check_amax, check_dequantize
from tests.samples import DTYPES, FORMATS, NAMES

CPU = torch.device("cpu")


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_amax_of_every_sample(name: str, source) -> None:
    check_amax(name, source, CPU)


def test_amax_of_a_number() -> None:
    check(amax, lambda device: (torch.tensor(-3.5, device=device), torch.zeros(1), 0), CPU)


@pytest.mark.parametrize(("source", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_of_every_sample(name: str, source, dtype) -> None:
    check_dequantize(name, source, dtype, CPU)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_dequantize_of_every_byte(dtype, source) -> None:
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    for scale in (1.0, 0.3, 2.0**-130, 3.0e38):
        check(dequantize, lambda _, s=scale: (bytes_, torch.tensor([s]), source), CPU)


def test_dimensions_in_another_order_are_kept() -> None:
    data = torch.arange(24, dtype=torch.int32).to(torch.uint8).view(2, 3, 4).permute(2, 0, 1)
    data = data.view(torch.float8_e4m3fn)
    check(dequantize, lambda _: (data, torch.ones(1), torch.float32), CPU)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_amax("strided", torch.bfloat16, device)
        check_dequantize("transposed", torch.bfloat16, torch.float8_e5m2, device)
