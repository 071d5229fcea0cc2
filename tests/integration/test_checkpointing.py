"""Activation recompute: the second forward equals the first, and counts only once."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.devices import current_device
from quaver.errors import QuaverError
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    equal,
    gradients,
    quantized_modules,
    scaling,
)

RECIPE = DelayedScaling(amax_history_len=3)
STEPS = 3

Devices = list[torch.device]


class Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.up = qv.Linear(16, 32, device=device)
        self.down = qv.Linear(32, 16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.device)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks over two devices; each runs under a checkpoint if `reentrant` is not None."""

    def __init__(self, devices: Devices, reentrant: bool | None) -> None:
        super().__init__()
        places = [devices[0], devices[1], devices[0], devices[1]]
        self.blocks = nn.ModuleList(Block(place) for place in places)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def step(model: nn.Module, x: torch.Tensor, recipe: Any = RECIPE) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    with qv.autocast(recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(model)}


@pytest.mark.parametrize("first_scale", ["amax", "one"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_equals_plain(
    devices: Devices, reentrant: bool, first_scale: str
) -> None:
    recipe = DelayedScaling(amax_history_len=3, first_scale=first_scale)
    plain = Model(devices, None)
    model = Model(devices, reentrant)
    model.load_state_dict(plain.state_dict())
    for i in range(STEPS):
        x = torch.randn(4, 16, device=devices[0]) * 2.0**i
        with launches() as log:
            results = step(model, x, recipe)
        assert_guarded(log, devices, least=8 * 8)
        kernels = [launch.kernel for launch in log]
        assert kernels.count("scaled_mm") == 8 * 4  # one product more a layer: it was recomputed
        assert kernels.count("scale_update") == 4  # one a device and direction
        assert_same(results, step(plain, x, recipe))
        assert_same(scaling(model), scaling(plain))
    for layer in quantized_modules(model).values():
        assert {state.updates for state in layer.recipe_states.values()} == {STEPS}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_uses_the_first_forwards_scales(devices: Devices, reentrant: bool) -> None:
    """An input that grows a hundredfold moves the scale a lot between forward and backward."""
    outputs = []
    block = Block(devices[1])
    block.up.register_forward_hook(lambda module, args, y: outputs.append(y.detach().clone()))
    for value in (1.0, 100.0):
        outputs.clear()
        x = torch.randn(4, 16, device=devices[1]) * value
        with qv.autocast(recipe=RECIPE):
            y = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)
        y.sum().backward()
        assert len(outputs) == 2
        assert torch.equal(*outputs)
    history = block.up.recipe_states["forward"].amax_history
    assert history[:, 0].count_nonzero() == 2  # two steps, two amaxes


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_inside_of_the_checkpointed_function(devices: Devices, reentrant: bool) -> None:
    block = Block(devices[1])
    plain = copy.deepcopy(block)

    def run(x: torch.Tensor) -> torch.Tensor:
        with qv.autocast(recipe=RECIPE):
            return block(x)

    for _ in range(STEPS):
        x = torch.randn(4, 16, device=devices[1])
        block.zero_grad()
        mine = x.clone().requires_grad_()
        y = checkpoint(run, mine, use_reentrant=reentrant)
        y.square().sum().backward()
        results = {"y": y.detach().cpu(), "dx": mine.grad.cpu(), **gradients(block)}
        assert_same(results, step(plain, x))
        assert_same(scaling(block), scaling(plain))


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_converted_block_with_a_recipe_of_its_own(devices: Devices, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(devices[1])
    qv.convert(model, RECIPE)
    plain = copy.deepcopy(model)
    for _ in range(STEPS):
        x = torch.randn(4, 16, device=devices[1])
        results = []
        for each, checkpointed in ((model, True), (plain, False)):
            each.zero_grad()
            mine = x.clone().requires_grad_()
            y = checkpoint(each, mine, use_reentrant=reentrant) if checkpointed else each(mine)
            y.square().sum().backward()
            results.append({"y": y.detach().cpu(), "dx": mine.grad.cpu(), **gradients(each)})
        assert_same(*results)
        assert_same(scaling(model), scaling(plain))
    assert model[0].recipe_states["forward"].updates == STEPS


class Outer(nn.Module):
    """A checkpoint around a model whose blocks are under checkpoints."""

    def __init__(self, inner: Model, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_nested_checkpoints(devices: Devices) -> None:
    model = Outer(Model(devices, reentrant=False), reentrant=False)
    plain = Model(devices, None)
    plain.load_state_dict(model.inner.state_dict())
    for i in range(STEPS):
        x = torch.randn(4, 16, device=devices[0]) * 2.0**i
        results = {k.removeprefix("inner."): v for k, v in step(model, x).items()}
        assert_same(results, step(plain, x))
        assert_same(scaling(model.inner), scaling(plain))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, inside
@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True)])
def test_a_reentrant_checkpoint_in_or_around_another_is_refused(
    devices: Devices, outer: bool, inner: bool
) -> None:
    """Its inner recomputations cannot be told apart; a wrong scale in silence would be worse."""
    model = Outer(Model(devices, inner), outer)
    x = torch.randn(4, 16, device=devices[0])
    for _ in range(2):
        with pytest.raises(QuaverError, match="pass use_reentrant=False") as caught:
            step(model, x)
        assert "\n" not in str(caught.value)
        assert current_device(devices[0].type) == devices[0]
    again, fresh = model.inner, Model(devices, None)
    again.reentrant = None
    fresh.load_state_dict(again.state_dict())
    for i in range(2):  # and nothing is left over
        x = torch.randn(4, 16, device=devices[0]) * 2.0**i
        assert_same(step(again, x), step(fresh, x))
    assert_same(scaling(again), scaling(fresh))


def test_two_forwards_before_two_backwards(devices: Devices) -> None:
    """Gradient accumulation over microbatches inside one region, each checkpointed."""
    block = Block(devices[1])
    plain = copy.deepcopy(block)
    for _ in range(2):
        inputs = [torch.randn(4, 16, device=devices[1], requires_grad=True) for _ in range(2)]
        results = []
        for each, checkpointed in ((block, True), (plain, False)):
            each.zero_grad()
            with qv.autocast(recipe=RECIPE):
                ys = [
                    checkpoint(each, x, use_reentrant=False) if checkpointed else each(x)
                    for x in inputs
                ]
            for y in ys:
                y.square().sum().backward()
            results.append(gradients(each))
        assert_same(*results)
        assert_same(scaling(block), scaling(plain))


def several_regions(
    block: Block, inputs: list[torch.Tensor], reentrant: bool | None, first_out: bool
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """All forwards, each in its own region, then all backwards: gradients, and what `up` gave."""
    seen: dict[float, list[torch.Tensor]] = {}

    def note(module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> None:
        seen.setdefault(args[0].sum().item(), []).append(y.detach().clone())

    handle = block.up.register_forward_hook(note)
    block.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    ys = []
    for x in leaves:
        with qv.autocast(recipe=RECIPE):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        ys.append(y.square().sum())
    for y in ys if first_out else reversed(ys):
        y.backward()
    handle.remove()
    grads = {f"x{i}": x.grad.cpu() for i, x in enumerate(leaves)}
    return {**grads, **gradients(block)}, [tuple(outputs) for outputs in seen.values()]


@pytest.mark.parametrize("first_out", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_forwards_in_regions_of_their_own_before_their_backwards(
    devices: Devices, reentrant: bool, first_out: bool
) -> None:
    """As in pipelines and siamese networks: each recompute needs the scales of its own forward."""
    block = Block(devices[1])
    step(block, torch.randn(4, 16, device=devices[1]))
    plain = copy.deepcopy(block)
    inputs = [torch.randn(4, 16, device=devices[1]) * 3.0**i for i in range(3)]
    for _ in range(2):
        results, outputs = several_regions(block, inputs, reentrant, first_out)
        expected, _ = several_regions(plain, inputs, None, first_out)
        assert [len(pair) for pair in outputs] == [2, 2, 2]
        assert all(equal(*pair) for pair in outputs)
        if not reentrant:  # else the first forwards are under no_grad, and update nothing
            assert_same(results, expected)
            assert_same(scaling(block), scaling(plain))
    for state in block.up.recipe_states.values():
        assert state.updates == 1 + 2 * 3
        assert state.amax_history[1:, 0].count_nonzero() == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_earlier_forward_on_another_thread_is_not_mistaken(
    devices: Devices, reentrant: bool
) -> None:
    """Each thread counts autograd's nodes by itself."""
    block = Block(devices[1])
    plain = copy.deepcopy(block)
    x = torch.randn(4, 16, device=devices[1]) * 10

    def warm_up() -> None:
        y = torch.zeros(1, requires_grad=True)
        for _ in range(torch._C._autograd._get_sequence_nr() + 1000):
            y = y + 1
        for each in (block, plain):
            step(each, x)

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    for i in range(2):
        x = torch.randn(4, 16, device=devices[1]) * 3.0**i
        results = []
        for each, checkpointed in ((block, True), (plain, False)):
            results.append(several_regions(each, [x], reentrant if checkpointed else None, False))
        assert_same(results[0][0], results[1][0])
        assert all(equal(*pair) for pair in results[0][1])
        assert_same(scaling(block), scaling(plain))


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_under_a_checkpoint_is_not_taken_for_inference(
    devices: Devices, reentrant: bool
) -> None:
    """A reentrant one runs its first forward under no_grad: no warning to calibrate is due."""
    model = nn.Sequential(nn.Linear(16, 16, device=devices[1]))
    qv.convert(model, RECIPE)
    x = torch.randn(4, 16, device=devices[1], requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
