"""Many tensors cast at once, bit for bit as `current_cast` casts each."""

import pytest
import torch

from quaver.kernels import current_cast, multi_cast
from quaver.kernels.multi_cast import reference
from tests.kernels.block_numerics import matrices, same_bits
from tests.samples import DTYPES, FORMATS, normal

E4M3 = torch.float8_e4m3fn

formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)
inputs = pytest.mark.parametrize("source", DTYPES, ids=str)


@pytest.fixture(autouse=True, params=[None, 100], ids=["", "small_chunks"])
def _chunks(request, monkeypatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(reference, "CHUNK_VALUES", request.param)


def room(xs, dtype):
    """Payloads, transposed payloads and scales to write to, filled with 1."""
    shapes = [x.shape for x in xs]
    made = (
        [torch.ones(shape, device=x.device).to(dtype) for x, shape in zip(xs, given, strict=True)]
        for given in (shapes, [shape[::-1] for shape in shapes])
    )
    return (*made, [torch.ones(1, device=x.device) for x in xs])


def check(xs, dtype, power_2, epsilon) -> None:
    data, transposed, scale_inv = room(xs, dtype)
    multi_cast(xs, data, transposed, scale_inv, dtype, power_2, epsilon)
    for i, x in enumerate(xs):
        expected = current_cast(x, dtype, power_2, epsilon, None, True)
        same_bits((data[i], transposed[i], scale_inv[i]), expected)


@formats
@inputs
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_every_sample_is_cast_bit_for_bit(epsilon, power_2, source, dtype) -> None:
    check(list(matrices(source)), dtype, power_2, epsilon)


def test_one_empty_tensor_alone() -> None:
    check([torch.zeros(0, 3)], E4M3, False, 0.0)


@formats
def test_dtypes_may_differ_and_only_what_is_asked_for_is_written(dtype) -> None:
    xs = [normal(5, 7, dtype=kind, name=str(kind)) for kind in DTYPES]
    data, transposed, scale_inv = room(xs, dtype)
    multi_cast(xs, data, [], scale_inv, dtype, False, 0.0)
    for i, x in enumerate(xs):
        row, col, inverse = current_cast(x, dtype, False, 0.0, None, True)
        same_bits((data[i], scale_inv[i]), (row, inverse))
        assert torch.equal(transposed[i].float(), torch.ones(7, 5))
        multi_cast([x], [], [transposed[i]], [scale_inv[i]], dtype, False, 0.0)
        same_bits((transposed[i],), (col,))


@formats
def test_devices_give_the_bytes_of_the_cpu(devices, dtype) -> None:
    xs = list(matrices(torch.bfloat16))
    expected = room(xs, dtype)
    multi_cast(xs, *expected, dtype, False, 0.0)
    for device in devices:
        there = [x.to(device) for x in xs]
        results = room(there, dtype)
        multi_cast(there, *results, dtype, False, 0.0)
        for got, wanted in zip(results, expected, strict=True):
            assert {tensor.device for tensor in got} == {device}
            same_bits(tuple(got), tuple(wanted))


def test_the_operator_is_registered_well() -> None:
    xs = [normal(4, 6), normal(3, 5)]
    data, transposed, scale_inv = room(xs, E4M3)
    args = (xs, data, transposed, scale_inv, E4M3, False, 0.0)
    # Without torch's test of the schema, which cannot compare FP8 operands.
    tests = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quaver.multi_cast.default, args, test_utils=tests)
