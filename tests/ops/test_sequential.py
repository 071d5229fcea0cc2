"""Sequential: nested, sliced, appended to, and with extra inputs and outputs."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver import ops
from quaver.testing import launches
from tests.integration.recipes import RECIPES
from tests.ops.chains import IN, OUT, make, unfused
from tests.samples import normal


def count(kernel: str, model: nn.Module, *inputs: torch.Tensor) -> int:
    with launches() as log, qv.autocast(recipe=RECIPES["current"]):
        model(*inputs)
    return [entry.kernel for entry in log].count(kernel)


class Spy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_nested_sequential_is_fused_with_its_neighbours(monkeypatch) -> None:
    inner = ops.Sequential(ops.Bias(OUT), ops.MakeExtraOutput())
    model = ops.Sequential(ops.BasicLinear(IN, OUT), ops.Sequential(inner), ops.ReLU())
    nn.init.normal_(inner[0].bias)
    x = normal(3, IN)
    twin = unfused(model)
    with qv.autocast(recipe=RECIPES["current"]):
        expected = twin(x)
        called = []
        monkeypatch.setattr(ops.Bias, "__call__", lambda self, x: called.append(x))
        found = model(x)
    assert called == []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["hook", "subclass", "replaced"])
def test_a_nested_sequential_that_does_more_is_called(how: str) -> None:
    log: list[str] = []

    class Logging(ops.Sequential):
        def forward(self, x: torch.Tensor, *extra: torch.Tensor):
            log.append("called")
            return super().forward(x, *extra)

    kind = Logging if how == "subclass" else ops.Sequential
    inner = kind(ops.Bias(IN), ops.AddExtraInput(), ops.MakeExtraOutput())
    if how == "hook":
        inner.register_forward_hook(lambda *args: log.append("called"))
    if how == "replaced":
        original = inner.forward
        inner.forward = lambda *args: (log.append("called"), original(*args))[1]
    model = ops.Sequential(ops.AddExtraInput(), inner, ops.ConstantScale(2.0))
    assert (model.num_extra_inputs, model.num_extra_outputs) == (2, 1)
    x, first, second = (normal(3, IN, name=name) for name in "abc")
    y, extra = model(x, first, second)
    assert log == ["called"]
    assert torch.equal(extra, x + first + second)
    assert torch.equal(y, 2 * extra)


def test_extra_tensors_go_by_the_order_of_the_operations_through_other_modules() -> None:
    model = ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        Spy(),
        ops.ConstantScale(10.0),
        ops.AddExtraInput(),
        nn.Tanh(),
        ops.MakeExtraOutput(),
        ops.Identity(),
        ops.AddExtraInput(),
    )
    x, a, b, c = (normal(3, 4, name=name) for name in "xabc")
    y, first, second = model(x, a, b, c)
    assert torch.equal(first, x + a)
    assert torch.equal(second, torch.tanh(first * 10 + b))
    assert torch.equal(y, second + c)
    assert isinstance(ops.Sequential(ops.Identity())(x), torch.Tensor)


@pytest.mark.parametrize("given", [0, 2])
def test_another_number_of_extra_inputs_is_an_error(given: int) -> None:
    model = ops.Sequential(ops.Bias(4), nn.ReLU(), ops.AddExtraInput())
    x = normal(3, 4)
    with pytest.raises(
        qv.QuaverError, match=r"1 extra inputs \(of AddExtraInput\).*not " f"{given}"
    ):
        model(x, *[x] * given)
    with pytest.raises(qv.QuaverError, match=r"0 extra inputs must follow x.*not 1"):
        ops.OperationFuser([ops.Bias(4)])(x, x)


def test_slices_and_indices() -> None:
    model = make("block")
    assert isinstance(model[1:], ops.Sequential)
    assert model[2:4][0] is model[2]
    assert isinstance(model[3], ops.SwiGLU)
    x = normal(3, IN)
    assert torch.equal(model[2:4](x), ops.SwiGLU()(model[2](x)))
    assert (model[:2].num_extra_inputs, model[:2].num_extra_outputs) == (0, 1)


def test_sums_and_multiples_fuse_and_take_extra_tensors() -> None:
    first, second = ops.Sequential(ops.Linear(4, 4)), nn.Sequential(ops.AddExtraInput())
    x, r = normal(3, 4), normal(3, 4, name="r")
    model = first + second
    assert type(model) is ops.Sequential
    assert torch.equal(model(x, r), first(x) + r)
    again = model * 2
    assert type(again) is type(2 * model) is ops.Sequential
    assert torch.equal(again(x, r, x), first(first(x) + r) + x)
    with pytest.raises(ValueError, match="add operator"):
        first + ops.GELU()


def test_what_is_appended_inserted_or_removed_counts_at_once() -> None:
    model = ops.Sequential(ops.BasicLinear(IN, IN))
    x = normal(3, IN)
    model.append(ops.Bias(IN))
    nn.init.ones_(model[1].bias)
    plain = nn.functional.linear(x, model[0].weight)
    assert torch.equal(model(x), plain + 1)
    model.insert(0, ops.ConstantScale(2.0))
    model.extend([nn.ReLU(), ops.AddExtraInput()])
    expected = torch.relu(nn.functional.linear(2 * x, model[1].weight) + 1) + x
    assert torch.equal(model(x, x), expected)
    model.pop(4)
    del model[3]
    assert torch.equal(model(x), nn.functional.linear(2 * x, model[1].weight) + 1)
    assert count("scaled_mm", model, x) == 1
    both = ops.Sequential(ops.Identity()) + ops.Sequential(ops.ReLU())
    assert [type(m) for m in both] == [ops.Identity, ops.ReLU]


def test_it_keeps_torchs_names_in_the_state_dict() -> None:
    model = ops.Sequential(ops.LayerNorm(IN), ops.Sequential(ops.Linear(IN, OUT), ops.GELU()))
    twin = nn.Sequential(
        nn.LayerNorm(IN), nn.Sequential(nn.Linear(IN, OUT), nn.GELU(approximate="tanh"))
    )
    twin[0].weight.data.normal_()
    model.load_state_dict(twin.state_dict())
    x = normal(3, IN)
    torch.testing.assert_close(model(x), twin(x))
    again = copy.deepcopy(model)
    assert torch.equal(again(x), model(x))
