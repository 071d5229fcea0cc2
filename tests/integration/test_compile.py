"""torch.compile: whole graphs, no compilation after the second step, equal to eager."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, gradients, scaling

STEPS = 5
RECIPE = DelayedScaling(amax_history_len=3)

Devices = list[torch.device]

# torch's own, seen while it traces an autograd.Function
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(device: torch.device) -> nn.Module:
    return qv.Linear(16, 32, device=device)


def two_layers(device: torch.device) -> nn.Module:
    layers = (qv.Linear(16, 32, device=device), nn.GELU(), qv.Linear(32, 32, device=device))
    return nn.Sequential(*layers)


class UnderAutocast(nn.Module):
    """The region is part of the traced graph."""

    def __init__(self, model: nn.Module, recipe: DelayedScaling | None) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with qv.autocast(recipe=self.recipe):
            return self.model(x)


def step(model: nn.Module, x: torch.Tensor, *, outside: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    if outside:
        with qv.autocast(recipe=RECIPE):
            y = model(x)
    else:
        y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(model)}


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("make", [linear, two_layers])
def test_traced_whole_and_equal_to_eager(devices: Devices, make, where: str) -> None:
    device, outside = devices[1], where == "outside"
    eager = make(device) if outside else UnderAutocast(make(device), RECIPE)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (eager, traced)]
    for i in range(STEPS):
        x = torch.randn(4, 16, device=device) * 2.0 ** (i % 3)
        with torch._dynamo.config.patch(error_on_recompile=i >= 2), launches() as log:
            traced.zero_grad()
            mine = x.clone().requires_grad_()
            if outside:
                with qv.autocast(recipe=RECIPE):
                    y = compiled(mine)
            else:
                y = compiled(mine)
            y.square().sum().backward()
        assert_guarded(log, [device], least=7)
        results = {"y": y.detach().cpu(), "dx": mine.grad.cpu(), **gradients(traced)}
        assert_same(results, step(eager, x, outside=outside))
        for optimizer in optimizers:
            optimizer.step()
    with qv.autocast(recipe=RECIPE):  # what backward recorded is finalized here at the latest
        pass
    assert_same(scaling(traced), scaling(eager))


def test_without_a_region_the_traced_module_is_plain(devices: Devices) -> None:
    layer = linear(devices[1])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16, device=devices[1])
    with launches() as log:
        y = compiled(x)
    assert log == []
    assert torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))
    with launches() as log, qv.autocast(recipe=RECIPE):  # and entering one is not ignored
        compiled(x)
    assert "scaled_mm" in {launch.kernel for launch in log}


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
def test_inference_is_traced_whole(devices: Devices) -> None:
    model = two_layers(devices[1])
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 16, device=devices[1])
        with torch.no_grad(), qv.autocast(recipe=RECIPE):
            assert torch.equal(compiled(x), twin(x))
