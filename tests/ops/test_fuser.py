"""Sequential and the fuser: what is computed together, and that it changes nothing."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver import ops
from quaver.ops.fuser import OperationFuser, fuse
from quaver.ops.fusions.linear import FusedLinear
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.samples import normal

RECIPE = DelayedScaling(amax_history_len=4)


def chain(k: int = 32, n: int = 24, device="cpu", dtype=torch.float32) -> ops.Sequential:
    torch.manual_seed(4)
    model = ops.Sequential(
        ops.BasicLinear(k, n, device=device, dtype=dtype), ops.Bias(n, device=device, dtype=dtype)
    )
    nn.init.normal_(model[1].bias)
    return model


def unfused(model: ops.Sequential) -> ops.Sequential:
    """The same operations, called one after the other."""
    twin = copy.deepcopy(model)
    for operation in twin:
        operation.register_forward_hook(lambda *args: None)
    assert not any(isinstance(step, FusedLinear) for step in fuse(list(twin)))
    return twin


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    with qv.autocast(recipe=RECIPE):
        y = model(x)
    y.backward(normal(*y.shape, dtype=y.dtype, name="grad").to(y.device))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return {"y": y.detach(), "x": x.grad} | grads


def test_the_fusion_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias is not called, and one product with a bias takes the place of two operations."""
    model = chain()
    steps = fuse(list(model))
    assert [type(each) for each in steps] == [FusedLinear]
    called = []
    monkeypatch.setattr(ops.Bias, "__call__", lambda self, x: called.append(x))
    with launches() as log:
        got = step(model, normal(5, 32))
    assert called == []
    assert [entry.kernel for entry in log].count("scaled_mm") == 3
    exact = nn.functional.linear(normal(5, 32), model[0].weight, model[1].bias)
    assert (got["y"] - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("shape", [(32, 24), (30, 12), (512, 64), (3000, 16)], ids=str)
def test_fused_equals_unfused_bit_for_bit(shape) -> None:
    model = chain(*shape)
    other = unfused(model)
    for i in range(3):
        x = normal(50, shape[0], name=f"step {i}")
        got, expected = step(model, x), step(other, x)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    for mode, state in other[0].recipe_states.items():
        mine = model[0].recipe_states[mode]
        assert torch.equal(mine.scale, state.scale)
        assert torch.equal(mine.amax_history, state.amax_history)
        assert mine.updates == state.updates == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_the_fused_sum_is_rounded_once_instead_of_twice(dtype) -> None:
    model = chain(dtype=dtype)
    other = unfused(model)
    x = normal(50, 32, dtype=dtype)
    got, expected = step(model, x), step(other, x)
    for name in ("x", "0.weight", "1.bias"):
        assert torch.equal(got[name], expected[name]), name
    eps = torch.finfo(dtype).eps
    magnitude = expected["y"].float().abs() + model[1].bias.detach().float().abs()
    difference = (got["y"].float() - expected["y"].float()).abs()
    assert (difference <= 2 * eps * magnitude + 1e-6).all()


@pytest.mark.parametrize("enabled", [None, False])
def test_in_high_precision_it_is_what_the_operations_give(enabled) -> None:
    model, x = chain(), normal(5, 32)
    expected = nn.functional.linear(x, model[0].weight) + model[1].bias
    if enabled is None:
        assert torch.equal(model(x), expected)
    else:
        with qv.autocast(enabled=enabled):
            assert torch.equal(model(x), expected)


def test_calibration_passes_through_the_fusion() -> None:
    model, x = chain(), normal(5, 32)
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = model(x)
    assert torch.equal(y, nn.functional.linear(x, model[0].weight) + model[1].bias)
    state = model[0].recipe_states["forward"]
    assert state.updates == 1
    assert state.amax_history[-1, 0].item() == x.abs().max().item()


HOOKS = {
    "forward": lambda m, log: m.register_forward_hook(lambda *a: log.append("hook")),
    "forward_pre": lambda m, log: m.register_forward_pre_hook(lambda *a: log.append("hook")),
    "with_kwargs": lambda m, log: m.register_forward_hook(
        lambda *a: log.append("hook"), with_kwargs=True
    ),
    "backward": lambda m, log: m.register_full_backward_hook(lambda *a: log.append("hook")),
    "backward_pre": lambda m, log: m.register_full_backward_pre_hook(lambda *a: log.append("hook")),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_an_operation_runs(kind: str, which: int) -> None:
    model, log = chain(), []
    HOOKS[kind](model[which], log)
    got = step(model, normal(5, 32))
    assert log == ["hook"]
    assert torch.equal(got["y"], step(chain(), normal(5, 32))["y"])


@pytest.mark.parametrize("which", [0, 1])
def test_a_replaced_forward_runs(which: int) -> None:
    """As accelerate replaces it on the instance."""
    model, called = chain(), []
    operation = model[which]
    original = operation.forward

    def replaced(x: torch.Tensor) -> torch.Tensor:
        called.append(which)
        return original(x)

    operation.forward = replaced
    step(model, normal(5, 32))
    assert called == [which]


@pytest.mark.parametrize("which", [0, 1])
def test_a_subclass_with_a_forward_of_its_own_runs(which: int) -> None:
    class Scaled(ops.BasicLinear):
        def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None):
            return super().forward(x, is_first_microbatch) * 2

    class Doubled(ops.Bias):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model, x = chain(), normal(5, 32)
    plain, bias = nn.functional.linear(x, model[0].weight), model[1].bias
    expected = (plain * 2 + bias, (plain + bias) * 2)[which]
    model[which].__class__ = (Scaled, Doubled)[which]
    assert torch.equal(model(x), expected)
    got = step(model, x)["y"]
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_hooks_are_looked_at_on_every_call() -> None:
    model, log = chain(), []
    step(model, normal(5, 32))
    handle = model[0].register_forward_hook(lambda *a: log.append("hook"))
    step(model, normal(5, 32))
    handle.remove()
    step(model, normal(5, 32))
    assert log == ["hook"]


def test_other_modules_stand_between() -> None:
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.BasicLinear(16, 16),
        ops.Bias(16),
        nn.GELU(),
        ops.Linear(16, 16),
        ops.Bias(16),
        nn.Tanh(),
    )
    x = normal(5, 16)
    plain = nn.Sequential(*model)
    assert torch.equal(model(x), plain(x))
    with launches() as log, qv.autocast(recipe=RECIPE):
        y = model(x)
    assert [entry.kernel for entry in log].count("scaled_mm") == 2
    assert (y - plain(x)).norm() < 0.1 * y.norm()
    assert torch.equal(ops.Sequential()(x), x)
    assert isinstance(model[:2], ops.Sequential)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("tensor", [0, 1])
def test_the_fuser_pins_the_inputs_device(devices, tensor: int, current: int) -> None:
    seen = []

    class Spy(ops.FusibleOperation):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.accelerator.current_device_index())
            return x

    model = chain(device=devices[tensor])
    with torch.accelerator.device_index(current), launches() as log:
        x = normal(5, 32, device=devices[tensor])
        OperationFuser([Spy(), *model])(x)
        step(ops.Sequential(Spy(), *model), x)
        assert torch.accelerator.current_device_index() == current
    assert seen == [tensor, tensor]
    assert len(log) >= 5
    assert {(entry.device, entry.current) for entry in log} == {(devices[tensor],) * 2}


def test_the_current_device_comes_back_when_an_operation_raises(devices) -> None:
    class Broken(ops.FusibleOperation):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        OperationFuser([Broken()])(torch.ones(2, device=devices[1]))
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(ValueError, match="32 features"):
        chain(device=devices[1])(torch.ones(2, 31, device=devices[1]))
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("stray", ["x", "bias"])
def test_two_devices_are_an_error_before_anything_ran(devices, stray: str) -> None:
    model = chain(device=devices[0])
    x = normal(5, 32, device=devices[1 if stray == "x" else 0])
    if stray == "bias":
        model[1].to(devices[1])
    refused = pytest.raises(qv.DeviceMismatchError, match=stray)
    with launches() as log, qv.autocast(recipe=RECIPE), refused as caught:
        model(x)
    assert str(devices[0]) in str(caught.value)
    assert str(devices[1]) in str(caught.value)
    assert log == []
