"""A model that accelerate splits over the CPU and a GPU, with every recipe, against the CPU alone.

The layers are compared one by one on what really reached them: the one on the CPU bit for bit, and
so are all casts and states. The GPU's products may sum in another order, and its tensor cores keep
fewer bits: see `Bound`. A simulated device stands for the GPU where there is none.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

import quaver as qv
from quaver.testing import launches, simulated_devices
from tests.integration import test_distributed as distributed
from tests.integration import test_multi_device as multi
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    quantized_modules,
    scaling,
    train_step,
)
from tests.integration.recipes import RECIPES
from tests.integration.test_distributed import own_recipe

CPU = torch.device("cpu")
SIZE = 32
"""All sizes: with so many terms a product is one instruction of the tensor cores."""
STEPS = 3


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "sim":
        return simulated_devices(2)[0]
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


class Bound(NamedTuple):
    """How far y = a bᵀ of two quantized operands may be from a sum in any other order.

    Tensor cores align the SIZE products of a sum to the largest of them and cut each off after 13
    fraction bits, so |error| <= SIZE 2^-13 max|a_k b_k|, and the largest is at most |a| |b|, the
    norms of the rows. Another 2 SIZE 2^-24 are for the reference's own sum, scales and the bias.
    The norm of a quantized row is taken as at most 1.5 times that of the row, which holds for FP4,
    the coarsest, stochastic rounding included. A Hadamard transform leaves norms as they are.
    """

    left: torch.Tensor
    right: torch.Tensor

    def error(self, exactly: bool) -> torch.Tensor:
        norms = self.left.norm(dim=1).outer(self.right.norm(dim=1))
        return norms * (0.0 if exactly else 1.5**2 * SIZE * (2.0**-13 + 2.0**-23))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, bound: Bound, exactly: bool) -> None:
    error = (ours.detach().cpu() - theirs.detach().cpu()).abs()
    assert (error <= bound.error(exactly)).all()


@contextmanager
def watched(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The layer's output, then its gradient."""
    seen: list[torch.Tensor] = []

    def keep(layer: nn.Module, args: object, output: torch.Tensor) -> None:
        seen.append(output.detach())
        output.register_hook(seen.append)

    handle = layer.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def run(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, recipe: qv.recipe.Recipe):
    """Output, gradient of the input, gradient of the weight; of a layer on the CPU."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with qv.autocast(recipe=recipe):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("first", ["CPU first", "GPU first"])
@pytest.mark.parametrize("name", RECIPES)
def test_each_layer_does_what_it_does_on_the_cpu_alone(
    accelerator: torch.device, name: str, first: str
) -> None:
    recipe = RECIPES[name]
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    qv.convert(model, recipe)
    alone = copy.deepcopy(model)
    places = [CPU, accelerator] if first == "CPU first" else [accelerator, CPU]
    model = dispatch_model(model, dict(zip("01", places, strict=True)), main_device="cpu")
    exactly = accelerator.type == "sim"
    for i in range(STEPS):
        x, grad = torch.randn(SIZE, SIZE) * 2.0**i, torch.randn(SIZE, SIZE)
        model.zero_grad()
        given = x.clone().requires_grad_()
        with launches() as log, watched(model[0]) as seen:
            with qv.autocast(recipe=recipe):
                y = model(given)
            y.backward(grad)
        assert y.device == given.grad.device == CPU
        assert_guarded(log, [CPU, accelerator])
        hidden, between = seen
        assert hidden.device == between.device == places[0]
        inputs = (x, hidden.cpu())
        grads = (between.cpu(), grad)
        ours = ((hidden, given.grad), (y, between))
        for j, place in enumerate(places):
            theirs = run(alone[j], inputs[j], grads[j], recipe)
            exact = exactly or place == CPU
            weight = model[j].weight
            assert weight.grad.device == weight.device == place
            pairs = zip((*ours[j], weight.grad), theirs, strict=True)
            operands = (
                Bound(inputs[j], weight.detach().cpu()),
                Bound(grads[j], weight.detach().cpu().t()),
                Bound(grads[j].t(), inputs[j].t()),
            )
            for (mine, other), bound in zip(pairs, operands, strict=True):
                assert_close(mine, other, bound, exact)
                assert equal(mine, other) or not exact
        if name in ("delayed", "nvfp4"):  # the others have no state to speak of
            assert_same(scaling(model), scaling(alone))
    for module, place in zip(quantized_modules(model).values(), places, strict=True):
        assert_state_devices(module, place)


ALONE = [
    multi.test_two_modules_on_different_devices_in_one_autocast,
    multi.test_operands_on_two_devices_are_named_before_anything_runs,
    multi.test_a_dead_model_takes_no_part,
    multi.test_two_live_models_do_not_finalize_each_other,
]
REDUCED = [
    distributed.test_the_other_ranks_amaxes_count,
    distributed.test_unused_and_dead_slots_are_zeros_and_keep_their_place,
    distributed.test_a_rank_without_any_use_takes_part,
    distributed.test_groups_and_recipes_are_reduced_apart,
    distributed.test_backward_is_reduced_once_for_all_devices,
]
"""Those of the multi-device suite that need no two devices of one type."""


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("test", [*ALONE, *REDUCED], ids=lambda test: test.__name__)
def test_the_multi_device_suite(
    accelerator: torch.device, test: Any, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [accelerator, CPU] if turned else [CPU, accelerator]
    own = 200 + 100 * turned  # a recipe's slots are never given up, so each run has its own recipes
    monkeypatch.setattr(
        distributed, "own_recipe", lambda length, **options: own_recipe(own + length, **options)
    )
    if test in REDUCED:
        test(devices, distributed.Reductions(monkeypatch))
    else:
        test(devices)


def test_three_layers_in_turn_and_a_backward_pass_with_two_threads(
    accelerator: torch.device,
) -> None:
    """Autograd runs the CPU's part on the thread that calls it, and the GPU's on another."""
    recipe = RECIPES["delayed"]
    for model in (
        multi.Interleaved([accelerator, CPU, accelerator]),
        multi.Branches([CPU, accelerator]),
    ):
        x, grad = torch.randn(4, SIZE), torch.randn(4, SIZE)
        for _ in range(STEPS):
            with launches() as log:
                results = train_step(model, x, grad, recipe)
            assert_guarded(log, [CPU, accelerator])
            assert all(tensor.isfinite().all() for tensor in results.values())
            updates = [launch.device for launch in log if launch.kernel == "scale_update"]
            assert sorted(map(str, updates)) == sorted(map(str, [CPU, accelerator] * 2))
            assert [launch.kernel for launch in log[-2:]] == ["scale_update"] * 2
        for layer in quantized_modules(model).values():
            assert_state_devices(layer, layer.weight.device)
            assert layer.recipe_states["backward"].updates == STEPS
