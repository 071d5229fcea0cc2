"""Many tensors cast at once on a GPU: the bytes of the CPU."""

import pytest
import torch

from quaver.kernels import multi_cast
from tests.kernels.block_numerics import matrices, same_bits
from tests.kernels.test_multi_cast import room
from tests.samples import FORMATS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("power_2", [False, True])
def test_the_bytes_are_those_of_the_cpu(power_2: bool, dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    xs = list(matrices(torch.float32))
    expected = room(xs, dtype)
    multi_cast(xs, *expected, dtype, power_2, 0.0)
    there = [x.to("cuda:0") for x in xs]
    results = room(there, dtype)
    multi_cast(there, *results, dtype, power_2, 0.0)
    for got, wanted in zip(results, expected, strict=True):
        same_bits(tuple(tensor.cpu() for tensor in got), tuple(wanted))
