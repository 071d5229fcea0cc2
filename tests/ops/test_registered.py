"""Fusions that users register."""

from collections.abc import Iterator

import pytest
import torch

import quaver as qv
from quaver import ops
from quaver.ops.fuser import fuse
from quaver.ops.fusions.linear import FusedLinear
from quaver.ops.fusions.rules import BUILT_IN, joined
from tests.integration.helpers import assert_same
from tests.integration.recipes import RECIPES
from tests.ops.chains import CHAINS, IN, OUT, make, step, unfused
from tests.samples import normal


class ScaledTwice(ops.FusedOperation):
    """ConstantScale, ConstantScale."""

    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        first, second = self.operations
        return x * first.scale * second.scale


def scales(steps: list) -> list:
    def join(left, right):
        both = isinstance(left, ops.ConstantScale) and isinstance(right, ops.ConstantScale)
        return ScaledTwice([left, right]) if both else None

    return joined(steps, join)


@pytest.fixture
def registered() -> Iterator[list]:
    handles: list = []
    yield handles
    for handle in handles:
        handle.remove()


def test_it_is_applied_until_it_is_removed(registered: list) -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(0.3), ops.ReLU())
    x = normal(3, 4)
    expected = model(x)
    handle = ops.register_fusion(scales)
    registered.append(handle)
    before = ScaledTwice.calls
    assert torch.equal(model(x), expected)
    assert ScaledTwice.calls == before + 1
    handle.remove()
    model(x)
    assert ScaledTwice.calls == before + 1


@pytest.mark.parametrize("prepend", [False, True])
def test_before_or_after_the_built_in_rules(registered: list, prepend: bool) -> None:
    operations = [ops.BasicLinear(IN, OUT), ops.ConstantScale(2.0), ops.ConstantScale(0.5)]
    registered.append(ops.register_fusion(scales, prepend=prepend))
    kinds = [type(each) for each in fuse(operations)]
    if prepend:
        assert kinds == [ops.BasicLinear, ScaledTwice]
    else:
        assert kinds == [FusedLinear, ops.ConstantScale]


def test_a_rule_sees_no_hooked_operation(registered: list) -> None:
    seen = []
    registered.append(ops.register_fusion(lambda steps: seen.append(steps) or steps, prepend=True))
    operations = [ops.ReLU(), ops.Bias(4), ops.Identity(), ops.GELU()]
    operations[1].register_forward_hook(lambda *args: None)
    assert fuse(operations) == operations
    assert seen == [operations[:1], operations[2:]]


class Leaky(ops.FusibleOperation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.1 * x)


class LinearLeaky(ops.FusedOperation):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.call_in_turn(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_operations_of_ones_own_can_be_fused(registered: list, recipe: str) -> None:
    def leaky(steps: list) -> list:
        def join(left, right):
            fits = isinstance(left, ops.Linear) and isinstance(right, Leaky)
            return LinearLeaky([left, right]) if fits else None

        return joined(steps, join)

    registered.append(ops.register_fusion(leaky))
    model = ops.Sequential(ops.Linear(IN, OUT), Leaky())
    assert [type(each) for each in fuse(list(model))] == [LinearLeaky]
    twin = unfused(model)
    for i in range(2):
        found = step("linear_bias", model, RECIPES[recipe], number=i)
        assert_same(found, step("linear_bias", twin, RECIPES[recipe], number=i))


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (lambda steps: steps[:1], r"stand for \[ReLU, Bias\], in this order, not for \[ReLU\]"),
        (lambda steps: steps[::-1], r"not for \[Bias, ReLU\]"),
        (lambda steps: [*steps, ops.Identity()], r"not for \[ReLU, Bias, Identity\]"),
        (lambda steps: None, "must return a list of FusibleOperation and FusedOperation, not None"),
        (lambda steps: [torch.relu], "must return a list"),
    ],
)
def test_a_rule_that_changes_the_operations_is_an_error(registered: list, rule, match) -> None:
    registered.append(ops.register_fusion(rule))
    with pytest.raises(qv.QuaverError, match=match):
        ops.Sequential(ops.ReLU(), ops.Bias(4))(normal(3, 4))


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(qv.QuaverError, match="must be a function of a list"):
        ops.register_fusion("linear_add")
    fused = ops.FusedOperation([ops.ReLU()])
    assert repr(fused) == "FusedOperation(ReLU)"
    with pytest.raises(NotImplementedError, match="does not say how"):
        fused(normal(2))


@pytest.mark.parametrize("name", CHAINS)
def test_rules_are_pure(name: str) -> None:
    steps = list(make(name))
    for rule in BUILT_IN:
        given = list(steps)
        once, again = rule(given), rule(given)
        assert given == steps
        assert [repr(s) for s in once] == [repr(s) for s in again]
        steps = once
    assert tuple(type(each) for each in steps) == CHAINS[name].fused


def test_what_computes_otherwise_is_not_fused() -> None:
    class Doubled(ops.GELU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Noisy(ops.MakeExtraOutput):
        def forward(self, x: torch.Tensor):
            return x, 2 * x

    linear = ops.Linear(IN, OUT)
    for operations in (
        [linear, Doubled()],
        [linear, ops.Bias(OUT)],  # it has a bias
        [linear, ops.AddExtraInput(in_place=True)],
        [Noisy(), linear],
        [Noisy(), ops.RMSNorm(IN)],
        [ops.GELU(), linear],
        [ops.Bias(OUT), ops.GELU()],
    ):
        assert fuse(operations) == operations
    steps = fuse([linear, ops.GELU(), ops.ConstantScale(2.0), ops.ReLU()])
    assert [type(each).__name__ for each in steps] == ["FusedLinear", "ConstantScale", "ReLU"]
