"""The keys under which compiled kernels are kept, against Triton's own specialization."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import native_specialize_impl  # noqa: E402

from quaver.kernels.common.triton_launch import _signature  # noqa: E402

INTEGERS = [
    0,
    1,
    2,
    15,
    16,
    17,
    -1,
    -16,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**33,
    2**33 + 1,
]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64]
MEMORY = torch.zeros(256, dtype=torch.uint8)
FUNCTIONS: list[Any] = []
"""Kept, as kernels are: a key begins with the function's id."""


def tensor(rng: random.Random) -> torch.Tensor:
    dtype, start = rng.choice(DTYPES), rng.choice([0, 2, 4, 8, 16, 24])
    start -= start % dtype.itemsize
    return MEMORY[start : start + 64].view(dtype)


def argument(kind: str, rng: random.Random) -> Any:
    if kind == "integer":
        return rng.choice(INTEGERS)
    if kind == "number":
        return rng.choice([0.0, 1.0, -2.5])
    if kind == "bool":
        return rng.random() < 0.5
    return rng.choice([None, tensor(rng)])


@pytest.mark.parametrize("plain", [(), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "kinds",
    [("tensor", "integer", "tensor"), ("integer",) * 3, ("tensor", "number", "bool")],
    ids="-".join,
)
def test_two_specializations_never_share_a_key(kinds: tuple[str, ...], plain: Any) -> None:
    rng = random.Random(0)
    parameters = [SimpleNamespace(do_not_specialize=i in plain) for i in range(len(kinds))]
    function = SimpleNamespace(params=parameters)
    FUNCTIONS.append(function)
    found: dict[Any, Any] = {}
    for _ in range(3000):
        args = tuple(argument(kind, rng) for kind in kinds)
        _, _, key = _signature(function, args, {})
        specialized = tuple(
            native_specialize_impl(CUDABackend, arg, False, not parameter.do_not_specialize, True)
            for arg, parameter in zip(args, parameters, strict=True)
        )
        assert found.setdefault(key, specialized) == specialized, args
    assert len(found) > 1
