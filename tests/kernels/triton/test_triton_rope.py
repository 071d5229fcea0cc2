"""`rope` in Triton's interpreter: the reference's bytes."""

import pytest
import torch

from quaver.kernels import rope, use_implementation
from tests.kernels.test_operators import assert_same_bytes
from tests.kernels.test_rope import FORMS, SHAPES, rope_case
from tests.samples import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_form(name: str, dtype: torch.dtype) -> None:
    for form in FORMS:
        args = (*rope_case(name, dtype), *form)
        with use_implementation("reference"):
            expected = rope(*args)
        assert_same_bytes(rope(*args), expected)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        y = rope(*rope_case("part", torch.bfloat16, device), True)
        assert y.device == device
        with use_implementation("reference"):
            assert_same_bytes(y.cpu(), rope(*rope_case("part", torch.bfloat16), True))


def test_a_position_beyond_the_table_gives_nan() -> None:
    x, cos, sin, positions = rope_case("whole", torch.float32)
    positions[1], positions[2] = 9, -1
    y = rope(x, cos, sin, positions, False)
    assert y[1:3].isnan().all()
    assert y[[0, 3, 4]].isfinite().all()
