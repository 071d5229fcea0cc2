"""The operator `rope`: as an operator, and the transpose that gradients need."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from quaver.errors import DeviceMismatchError, QuaverError
from quaver.kernels import rope
from tests.kernels.test_operators import TESTS, assert_same_bytes, described
from tests.samples import DTYPES, normal

FORMS = [(i, t) for i in (False, True) for t in (False, True)]
SHAPES = {
    "whole": (5, 3, 8, 8),
    "part": (7, 2, 10, 6),
    "empty": (0, 3, 8, 8),
    "wide": (3, 5, 96, 96),
}


def rope_case(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """x, cos, sin and positions; x is a view of something wider."""
    tokens, heads, width, turned = SHAPES[name]
    x = normal(tokens, 2 * heads, width + 3, dtype=dtype, device=device)[:, ::2, :width]
    angles = normal(9, turned, name="angles") * 4
    positions = torch.arange(tokens, device=device) * 5 % 9
    return x, angles.cos().to(device), angles.sin().to(device), positions


def matrix(*operands: torch.Tensor, interleaved: bool, transposed: bool) -> torch.Tensor:
    """R of the first token, column by column."""
    x, cos, sin, positions = operands
    columns = torch.eye(x.shape[-1])[:, None]
    at = positions[:1].expand(len(columns))
    return rope(columns, cos, sin, at, interleaved, transposed)[:, 0].t()


@pytest.mark.parametrize(("interleaved", "transposed"), FORMS)
@pytest.mark.parametrize("name", ["whole", "part"])
def test_the_transpose_is_the_transpose(name: str, interleaved: bool, transposed: bool) -> None:
    """Also where the two angles of a pair differ, and R is no rotation."""
    operands = rope_case(name, torch.float32)
    left = matrix(*operands, interleaved=interleaved, transposed=transposed)
    right = matrix(*operands, interleaved=interleaved, transposed=not transposed)
    assert torch.equal(left, right.t())
    assert not torch.equal(left, right)
    x, *tables = operands
    product = (left @ x[0].t()).t()
    torch.testing.assert_close(rope(x, *tables, interleaved, transposed)[0], product)


@pytest.mark.parametrize(("interleaved", "transposed"), FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_opcheck_and_fake_results(name: str, interleaved: bool, transposed: bool, devices) -> None:
    for device in ("cpu", devices[1]):
        args: tuple[Any, ...] = (*rope_case(name, torch.bfloat16, device), interleaved, transposed)
        operator = torch.ops.quaver.rope.default
        real = operator(*args)
        assert_same_bytes(rope(*args), real)
        assert real.device == args[0].device
        if name != "empty":
            torch.library.opcheck(operator, args, test_utils=TESTS)
    with FakeTensorMode() as mode:
        assert described(operator(*tree_map_only(torch.Tensor, mode.from_tensor, args))) == (
            described(real)
        )
    meta = operator(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), args))
    assert described(meta) == described(real)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_rounds_once(dtype: torch.dtype) -> None:
    x, *tables = rope_case("part", dtype)
    y = rope(x, *tables, True)
    assert y.dtype == dtype
    assert torch.equal(y, rope(x.float(), *tables, True).to(dtype))


def test_errors(devices) -> None:
    x, cos, sin, positions = rope_case("part", torch.float32)
    for wrong in (
        (x[0], cos, sin, positions),
        (x, cos[:, :5], sin[:, :5], positions),
        (x, cos, sin[:, :4], positions),
        (x[..., :4], cos, sin, positions),
        (x, cos, sin, positions[1:]),
    ):
        with pytest.raises(QuaverError, match="rope needs x"):
            rope(*wrong, False)
    with pytest.raises(DeviceMismatchError, match="positions is on"):
        rope(x, cos, sin, positions.to(devices[1]), False)
