"""Promises about recomputation and the states of modules that were broken once."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import quaver as qv
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe
from quaver.scaling import backward
from tests.integration.helpers import assert_same, assert_state_devices, gradients, scaling

Devices = list[torch.device]

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
}
STEPS = 4

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
both_kinds = pytest.mark.parametrize("reentrant", [True, False])


class Two(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, here: torch.device, there: torch.device) -> None:
        super().__init__()
        self.first = qv.LayerNormLinear(16, 16, device=here)
        self.second = qv.Linear(16, 16, device=there)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to(self.second.weight.device))


Run = Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]


def assert_trains_like_the_plain(
    model: nn.Module, recipe: Recipe, run: Run, function: Callable[..., Any] | None = None
) -> None:
    """`run(function, x)` recomputes; gradients and scales are those without, step by step.

    The inputs grow fast, so that another update's scales would show.
    """
    plain = copy.deepcopy(model)
    function = function or (lambda module, x: module(x))
    device = next(model.parameters()).device
    for i in range(STEPS):
        start = torch.randn(4, 16, device=device) * 3.0**i
        found = []
        for module, recomputes in ((model, True), (plain, False)):
            module.zero_grad()
            x = start.clone().requires_grad_()
            with qv.autocast(recipe=recipe):
                wanted = partial(function, module)
                y = run(wanted, x) if recomputes else wanted(x)
            y.square().sum().backward()
            found.append({"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(module)})
        assert_same(*found)
        if isinstance(recipe, DelayedScaling):
            assert_same(scaling(model), scaling(plain))


# ---- what a recomputation repeats


class Same(torch.autograd.Function):
    """A Function of somebody else's, which takes a number of autograd's also under no_grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@every_recipe
@both_kinds
def test_another_function_before_a_module_under_a_checkpoint(
    devices: Devices, recipe: Recipe, reentrant: bool
) -> None:
    assert_trains_like_the_plain(
        Two(devices[1], devices[1]),
        recipe,
        lambda function, x: checkpoint(function, x, use_reentrant=reentrant),
        lambda module, x: module(Same.apply(Same.apply(x))),
    )


class Discarded(torch.autograd.Function):
    """A first run without a graph, whose recomputation a hook starts on a later tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any, kept: dict[str, Any]) -> torch.Tensor:
        kept.update(x=x.detach(), function=function)
        ctx.kept = kept
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        torch.autograd.backward(ctx.kept["y"], grad)
        return ctx.kept["x"].grad, None, None


def recompute(kept: dict[str, Any], grad: torch.Tensor) -> None:
    kept["x"].requires_grad_()
    with torch.enable_grad():
        kept["y"] = kept["function"](kept["x"])


@every_recipe
def test_a_recomputation_that_a_tensor_s_hook_starts(devices: Devices, recipe: Recipe) -> None:
    def run(function: Any, x: torch.Tensor) -> torch.Tensor:
        kept: dict[str, Any] = {}
        y = Discarded.apply(x, function, kept) * 1
        y.register_hook(partial(recompute, kept))
        return y

    assert_trains_like_the_plain(Two(devices[1], devices[1]), recipe, run)


@every_recipe
@both_kinds
def test_other_hooks_on_saved_tensors_inside_a_checkpoint(
    devices: Devices, recipe: Recipe, reentrant: bool
) -> None:
    def function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            hidden = model.first(x)
        return model.second(hidden)

    assert_trains_like_the_plain(
        Two(devices[1], devices[1]),
        recipe,
        lambda function, x: checkpoint(function, x, use_reentrant=reentrant),
        function,
    )


@every_recipe
def test_selective_checkpointing_keeps_products(devices: Devices, recipe: Recipe) -> None:
    """The second run does the same operations as the first, and writes into none of its results."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    assert_trains_like_the_plain(
        Two(devices[1], devices[1]),
        recipe,
        lambda function, x: checkpoint(function, x, use_reentrant=False, context_fn=kept),
    )


@pytest.mark.parametrize("later", [0, 1])
@every_recipe
def test_branches_on_two_devices_under_one_checkpoint(
    devices: Devices, recipe: Recipe, later: int
) -> None:
    """The branch that backward comes to first is not the one that ran last."""
    layers = nn.ModuleList(qv.Linear(16, 16, device=device) for device in devices)
    plain = copy.deepcopy(layers)
    for i in range(STEPS):
        start = torch.randn(4, 16, device=devices[0]) * 3.0**i
        for pair, recomputes in ((layers, True), (plain, False)):
            pair.zero_grad()

            def run(x: torch.Tensor, pair: nn.ModuleList = pair) -> list[torch.Tensor]:
                return [layer(x.to(d)) for layer, d in zip(pair, devices, strict=True)]

            with qv.autocast(recipe=recipe):
                ys = checkpoint(run, start, use_reentrant=False) if recomputes else run(start)
            for y in (ys[1 - later], ys[later]):
                y.square().sum().backward(retain_graph=True)
        assert_same(gradients(layers), gradients(plain))


@every_recipe
def test_a_checkpoint_on_a_thread_that_has_the_number_of_an_earlier_one(recipe: Recipe) -> None:
    """Autograd counts from 0 on each thread, and threads' numbers are given away again."""
    model = Two(torch.device("cpu"), torch.device("cpu"))
    errors: list[Exception] = []

    def step(nodes: int, reentrant: bool) -> None:
        try:
            x = torch.zeros(4, 16, requires_grad=True)
            for _ in range(nodes):
                x = x + 1
            with qv.autocast(recipe=recipe):
                y = checkpoint(model, x, use_reentrant=reentrant)
            y.sum().backward()
        except Exception as error:
            errors.append(error)

    for reentrant in (True, False):
        for nodes in (300, 3, 200, 2):
            thread = threading.Thread(target=step, args=(nodes, reentrant))
            thread.start()
            thread.join()
    assert errors == []


def test_two_devices_recomputations_are_finalized_together(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a pass: with a reduction, ranks may have other devices than this one."""
    settled: list[int] = []
    settle = backward.settle

    def counting(used: Any) -> None:
        settled.append(len(used.states))
        settle(used)

    monkeypatch.setattr(backward, "settle", counting)
    model = Two(*devices)
    for _ in range(2):
        settled.clear()
        x = torch.randn(4, 16, device=devices[0], requires_grad=True)
        with qv.autocast(recipe=RECIPES["delayed"]):
            y = checkpoint(model.first, x, use_reentrant=True)
            y = checkpoint(model.second, y.to(devices[1]), use_reentrant=True)
        y.sum().backward()
        assert settled == [4]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, in tracing
@both_kinds
def test_a_compiled_module_inside_a_checkpoint_is_refused(reentrant: bool) -> None:
    """Outside of the region that it ran in, it would repeat itself in high precision."""
    torch._dynamo.reset()
    layer = torch.compile(qv.Linear(16, 16), backend="aot_eager")
    x = torch.randn(4, 16, requires_grad=True)
    with qv.autocast(recipe=RECIPES["current"]):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    with pytest.raises(Exception, match="compile around torch"):
        y.sum().backward()


# ---- states


def test_a_module_that_moves_before_its_region_ends(devices: Devices) -> None:
    stays, moves = qv.Linear(8, 8, device=devices[0]), qv.Linear(8, 8, device=devices[0])
    x = torch.randn(4, 8, device=devices[0])
    with qv.autocast(recipe=RECIPES["delayed"]):
        stays(x)
        moves(x)
        moves.to(devices[1])
    for layer, device in ((stays, devices[0]), (moves, devices[1])):
        state = layer.recipe_states["forward"]
        expected = torch.tensor(448.0) / x.cpu().abs().max()
        assert torch.equal(state.scale[0].cpu(), expected)
        with qv.autocast(recipe=RECIPES["delayed"]):
            layer(x.to(device)).sum().backward()
        assert_state_devices(layer, device)


def test_random_bits_go_on_when_recipes_take_turns() -> None:
    """Otherwise each change would begin with the same bits, and what they round away stays so."""
    layer, numbers = qv.Linear(16, 16), []
    for i in range(4):
        recipe = NVFP4BlockScaling(disable_2d_quantization=bool(i % 2))
        with qv.autocast(recipe=recipe):
            layer(torch.randn(4, 16)).sum().backward()
        numbers.append(layer.recipe_states["backward"].last_number())
    assert numbers == [numbers[0] + i for i in range(4)]


def test_a_delayed_gradient_that_failed_is_not_lost() -> None:
    options = WgradOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer, twin = qv.Linear(16, 16, wgrad=options), qv.Linear(16, 16)
    twin.load_state_dict(layer.state_dict())
    for x in torch.randn(2, 4, 16):
        for each in (layer, twin):
            with qv.autocast(recipe=RECIPES["current"]):
                each(x).square().sum().backward()
    for _ in range(2):
        with pytest.raises(qv.QuaverError, match="main_grad"):
            layer.backward_dw()
    layer.weight.main_grad = torch.zeros(16, 16)
    for _ in range(2):  # the second time there is nothing left to do
        layer.backward_dw()
    assert torch.equal(layer.weight.main_grad, twin.weight.grad)


@pytest.mark.parametrize("delay", [False, True])
def test_a_first_microbatch_s_gradients_of_one_weight_add_up(delay: bool) -> None:
    """Of a module that runs twice, and of two modules with one weight, in one backward pass."""
    options = WgradOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    layers = [qv.Linear(16, 16, wgrad=options) for _ in range(2)]
    twins = [qv.Linear(16, 16) for _ in range(2)]
    for mine, twin in zip(layers, twins, strict=True):
        twin.load_state_dict(mine.state_dict())
    for pair in (layers, twins):
        pair[1].weight = pair[0].weight
    weight = layers[0].weight
    weight.main_grad = torch.full((16, 16), 7.0)  # of the step before
    for x in torch.randn(2, 4, 16):
        twins[0].weight.grad = None
        for first, second in (layers, twins):
            with qv.autocast(recipe=RECIPES["current"]):
                y = second(first(first(x, True), True), True)
            y.square().sum().backward()
        for layer in layers:
            layer.backward_dw()
        torch.testing.assert_close(weight.main_grad, twins[0].weight.grad)
