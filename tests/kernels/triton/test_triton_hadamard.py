"""`hadamard` in Triton's interpreter."""

import pytest
import torch

from tests.kernels.triton.blocks import CASES, check_hadamard, several_tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize("x", CASES + several_tiles(128), ids=str)
def test_every_matrix(x) -> None:
    check_hadamard(x, CPU)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_hadamard(("ragged", torch.bfloat16), device)
