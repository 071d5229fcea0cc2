"""Every kernel as a torch operator: opcheck, shapes under fake tensors, the meta device."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from quaver import kernels
from tests.samples import NAMES, normal, sample

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
WITH_FP8_INPUTS = ("dequantize", "scaled_mm")  # torch's test of the schema cannot compare FP8


def arguments(name: str, x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Arguments of the operator `name`, made from the sample x."""
    one, device = torch.ones(1, device=x.device), x.device
    three = torch.tensor([2.0, 3.0, 4.0], device=device)
    history = torch.zeros(4, 3, device=device)
    if name == "amax":
        return [(x, history, 2)]
    if name == "cast":
        return [
            (x, three, None, None, 1, E4M3, False),
            (x, three, history, torch.zeros(3, device=device), 2, E5M2, True, 1),
        ]
    if name == "dequantize":
        return [(x.to(E4M3), one * 0.3, torch.bfloat16), (x.to(E5M2), one, torch.float32)]
    if name == "scaled_mm":
        a = x.flatten(1).to(E5M2) if x.dim() > 1 else x.unsqueeze(0).to(E5M2)
        b = normal(5, a.shape[1], device=device).to(E4M3)
        bias = normal(5, device=device, name="bias")
        return [(a, one, b, one, bias, torch.float32), (a, one, b, one, None, torch.bfloat16)]
    amaxes = normal(6, device=device, name="amaxes").abs()
    states = [normal(4, 3, device=device, name=n).abs() for n in "ab"]
    scales, readies = [three, three * 2], [three * 0, three * 0 + 1]
    return [
        (states, scales, readies, None, 448.0, "max"),
        (states, scales, readies, amaxes, 448.0, "most_recent"),
    ]


OPERATORS = ("amax", "cast", "dequantize", "scaled_mm", "scale_update")


def operator(name: str) -> Any:
    return getattr(torch.ops.quaver, name).default


def opcheck(name: str, args: tuple[Any, ...], tests: tuple[str, ...]) -> None:
    if name in WITH_FP8_INPUTS:
        tests = tuple(test for test in tests if test != "test_schema")
    torch.library.opcheck(operator(name), args, test_utils=tests)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["ragged", "three_dims", "transposed"])
def test_opcheck_on_the_cpu(name: str, kind: str) -> None:
    for args in arguments(name, sample(kind)):
        opcheck(name, args, (*TESTS, "test_autograd_registration"))


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_on_another_device_than_the_current(name: str, devices) -> None:
    for kind in ("ragged", "transposed"):
        for args in arguments(name, sample(kind, device=devices[1])):
            opcheck(name, args, TESTS)


@pytest.mark.parametrize("name", WITH_FP8_INPUTS)
def test_what_the_schema_does_not_name_is_not_written(name: str) -> None:
    """In place of torch's test where that cannot compare."""
    for args in arguments(name, sample("ragged")):
        before = tree_map_only(torch.Tensor, torch.clone, args)
        result = operator(name)(*args)
        assert_same_bytes(args, before)
        storages = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        assert result.untyped_storage().data_ptr() not in storages


def described(result: Any) -> list[tuple[Any, ...]]:
    tensors = result if isinstance(result, tuple) else () if result is None else (result,)
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", NAMES)
def test_fake_and_meta_results_look_like_real_ones(name: str, kind: str) -> None:
    for args in arguments(name, sample(kind)):
        real = described(operator(name)(*args))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake_args = tree_map_only(torch.Tensor, mode.from_tensor, args)
            assert described(operator(name)(*fake_args)) == real
        meta_args = tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
        result = operator(name)(*meta_args)
        assert described(result) == real
        for tensor in result if isinstance(result, tuple) else (result,):
            assert tensor is None or tensor.device.type == "meta"


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", NAMES)
def test_the_function_that_the_code_calls_is_the_operator(name: str, kind: str) -> None:
    x = sample(kind)
    for left, right in zip(arguments(name, x), arguments(name, x), strict=True):
        called = getattr(kernels, name)(*left)
        dispatched = operator(name)(*right)
        assert_same_bytes(called, dispatched)
        assert_same_bytes(left, right)  # what is written in place


def assert_same_bytes(left: Any, right: Any) -> None:
    if isinstance(left, tuple | list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same_bytes(a, b)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
        assert torch.equal(a, b)
    else:
        assert left == right


@pytest.mark.parametrize("name", OPERATORS)
def test_results_on_a_device_equal_those_on_the_cpu(name: str, devices) -> None:
    """Bit for bit, products too on simulated devices, while another device is current."""
    for kind in NAMES:
        there_args = arguments(name, sample(kind, device=devices[1]))
        for here, there in zip(arguments(name, sample(kind)), there_args, strict=True):
            expected, got = operator(name)(*here), operator(name)(*there)
            results = got if isinstance(got, tuple) else () if got is None else (got,)
            assert all(t.device == devices[1] for t in results)
            if name == "scaled_mm" and devices[1].type != "sim":
                torch.testing.assert_close(got.cpu(), expected, equal_nan=True)
                continue
            assert_same_bytes(tree_map_only(torch.Tensor, torch.Tensor.cpu, got), expected)
            assert_same_bytes(tree_map_only(torch.Tensor, torch.Tensor.cpu, there), here)
