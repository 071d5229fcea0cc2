"""The cast of an output's gradient with its column sums."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver.kernels import cast, cast_grad
from tests.kernels.triton.per_tensor import MATRICES, assert_same, assert_sums
from tests.samples import DTYPES, FORMATS, normal, sample


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_it_is_the_cast_and_the_sums(name: str, source, dtype) -> None:
    x = sample(name, source)
    for ready in (None, 0.0, 1.0):
        results = []
        for operation in (cast, cast_grad):
            cell = None if ready is None else torch.tensor([0.0, ready])
            amax, scale = torch.tensor([[0.0, 0.25]]), torch.tensor([1.0, 3.7])
            made = operation(x, scale, amax, cell, 1, dtype, True, 2)
            results.append([*made[:3], amax])
        assert_same(*results)
    sums = made[3]
    assert sums.shape == (x.shape[1],)
    assert_sums(x, sums)


def test_the_sums_are_of_what_was_given_not_of_its_payload() -> None:
    x = torch.full((3, 2), 1.0 + 2**-7, dtype=torch.bfloat16)  # E5M2 has no such value
    sums = cast_grad(x, torch.ones(1), None, None, 0, torch.float8_e5m2, False)[3]
    assert sums.tolist() == [3 * (1.0 + 2**-7)] * 2


def test_on_another_device_than_the_current(devices) -> None:
    one = torch.ones(1, device=devices[1])
    for tensor in cast_grad(sample("ragged", device=devices[1]), one, None, None, 0, FORMATS[1], 1):
        assert tensor.device == devices[1]


@pytest.mark.parametrize("name", ["ragged", "transposed"])
def test_opcheck(name: str) -> None:
    for args in (
        (torch.ones(1), None, None, 0, FORMATS[0], False),
        (torch.ones(3), torch.zeros(2, 3), torch.zeros(3), 2, FORMATS[1], True, 1),
    ):
        operator = torch.ops.quaver.cast_grad.default
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, (sample(name), *args), test_utils=tests)


def test_shapes_under_fake_tensors() -> None:
    with FakeTensorMode():
        x, one = torch.empty(4, 6, dtype=torch.bfloat16), torch.ones(1)
        made = torch.ops.quaver.cast_grad(x, one, None, None, 0, FORMATS[1], True)
    assert [tuple(t.shape) for t in made] == [(4, 6), (6, 4), (1,), (6,)]
    assert [t.dtype for t in made] == [FORMATS[1], FORMATS[1], torch.float32, torch.float32]


def test_two_runs_give_the_same_bits() -> None:
    x, one = normal(300, 7, dtype=torch.bfloat16), torch.ones(1)
    first, second = (cast_grad(x, one, None, None, 0, FORMATS[1], False)[3] for _ in range(2))
    assert torch.equal(first, second)
