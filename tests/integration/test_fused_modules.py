"""LayerNormLinear and LayerNormMLP over devices, threads of autograd and under torch.compile."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    gradients,
    reference_device,
    scaling,
    train_step,
)
from tests.integration.recipes import RECIPES
from tests.integration.test_recipes_compile import step as traced_step

Devices = list[torch.device]

every_recipe = pytest.mark.parametrize("name", RECIPES)


class Block(nn.Module):
    """A small transformer block without attention: norm and projections, a residual, an MLP."""

    def __init__(self, devices: Devices, activation: str = "swiglu") -> None:
        super().__init__()
        self.devices = devices
        here, there = devices
        self.qkv = qv.LayerNormLinear(16, 48, device=here)
        self.projection = qv.Linear(48, 16, device=there)
        self.mlp = qv.LayerNormMLP(
            16, 24, normalization="RMSNorm", activation=activation, device=there
        )
        self.last = qv.LayerNormLinear(16, 16, normalization="RMSNorm", bias=False, device=here)
        for key, module in self.named_children():
            module.qualified_name = key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, there = self.devices
        x = x.to(there) + self.projection(self.qkv(x.to(here)).to(there))
        return self.last((x + self.mlp(x)).to(here))


@every_recipe
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_split_model_equals_the_unsplit_bit_for_bit(devices: Devices, name, activation) -> None:
    here, there = devices
    split, whole = Block(devices, activation), Block([there, there], activation)
    whole.load_state_dict(split.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (split, whole)]
    outputs = set()
    for i in range(4):
        x, grad = torch.randn(4, 16).to(here) * 2**i, torch.randn(4, 16)
        with launches() as log:
            results = train_step(split, x, grad, RECIPES[name])
        assert_guarded(log, devices)
        assert_same(results, train_step(whole, x.to(there), grad, RECIPES[name]))
        outputs.add(tuple(results["y"][0].tolist()))
        for optimizer in optimizers:
            optimizer.step()
    assert len(outputs) == 4
    assert scaling(split).keys() == scaling(whole).keys()
    for key, value in scaling(split).items():
        assert equal(value, scaling(whole)[key]), key
    assert_state_devices(split.qkv, here)
    assert_state_devices(split.mlp, there)
    assert_same(
        {key: value.cpu() for key, value in split.state_dict().items()},
        {key: value.cpu() for key, value in whole.state_dict().items()},
    )


@every_recipe
@pytest.mark.parametrize("current", [0, 1])
def test_the_tensors_device_counts_and_the_cpu_gives_the_same(devices, name, current) -> None:
    block = Block([devices[1], devices[1]])
    twin = Block([reference_device(devices)] * 2)
    twin.load_state_dict(block.state_dict())
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    with launches() as log, torch.accelerator.device_index(current):
        results = train_step(block, x.to(devices[1]), grad, RECIPES[name])
    assert_guarded(log, [devices[1]])
    assert_same(results, train_step(twin, x.to(twin.devices[0]), grad, RECIPES[name]))


@every_recipe
def test_state_follows_the_module(devices: Devices, name) -> None:
    here, there = devices
    block = Block([here, here])
    stays = Block([here, here])
    stays.load_state_dict(block.state_dict())
    for i in range(3):
        x, grad = torch.randn(4, 16), torch.randn(4, 16)
        if i == 1:
            block.to(there)
            block.devices = [there, there]
        results = train_step(block, x.to(block.devices[0]), grad, RECIPES[name])
        assert_same(results, train_step(stays, x.to(here), grad, RECIPES[name]))
    assert_state_devices(block.mlp, there)


class UnderAutocast(nn.Module):
    def __init__(self, inner: nn.Module, recipe: qv.recipe.Recipe) -> None:
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with qv.autocast(recipe=self.recipe):
            return self.inner(x)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("delayed", "mxfp8") else pytest.mark.slow) for n in RECIPES],
)
def test_training_is_traced_whole_and_equal_to_eager(devices: Devices, name) -> None:
    device = devices[1]
    eager = UnderAutocast(
        nn.Sequential(
            qv.LayerNormLinear(16, 16, device=device),
            qv.LayerNormMLP(16, 24, activation="swiglu", normalization="RMSNorm", device=device),
        ),
        RECIPES[name],
    )
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (eager, traced)]
    for i in range(3):
        x = torch.randn(4, 16, device=device) * 2.0 ** (i % 3)
        with torch._dynamo.config.patch(error_on_recompile=i >= 2), launches() as log:
            results = traced_step(compiled, x)
        assert_guarded(log, [device])
        assert_same(results, traced_step(eager, x))
        assert_same(gradients(traced), gradients(eager))
        for optimizer in optimizers:
            optimizer.step()
