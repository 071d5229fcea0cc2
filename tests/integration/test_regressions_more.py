"""Promises about regions, threads and copies that were broken once; each test says which."""

import asyncio
import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.recipe import DelayedScaling, NVFP4BlockScaling, Recipe
from quaver.scaling import current_region
from quaver.testing import launches
from tests.integration.helpers import assert_same, equal, gradients, scaling
from tests.samples import normal

RECIPE, OTHER = (DelayedScaling(amax_history_len=4, margin=margin) for margin in (0, 1))

uncalibrated = pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")


def updates(module: nn.Module, mode: str = "forward") -> int:
    return module.recipe_states[mode].updates


def margin_of(module: nn.Module) -> int:
    return module.recipe_states["forward"].recipe.margin


def assert_high_precision_here() -> None:
    """No region is left on this thread."""
    layer, x = qv.Linear(8, 8), normal(4, 8)
    with launches() as log:
        y = layer(x)
    kernels = {launch.kernel for launch in log}
    assert kernels <= {"scale_update"}, "a call that was interrupted is finalized late"
    assert torch.equal(y, linear(x, layer.weight, layer.bias))
    assert current_region() is None


def assert_regions_finalize() -> None:
    """An `autocast` is the outermost, and updates scales at its exit."""
    layer, x = qv.Linear(8, 8), normal(4, 8)
    for step in (1, 2):
        with qv.autocast(recipe=RECIPE):
            layer(x)
        assert updates(layer) == step
    scale = layer.recipe_states["forward"].scale[0].item()
    assert scale == (torch.tensor(448.0) / x.abs().max()).item()


# ---- regions that do not end in the order in which they began


@pytest.mark.parametrize("inner_first", [True, False])
def test_high_precision_outside_whatever_a_generator_holds_open(inner_first: bool) -> None:
    layer, x = qv.Linear(8, 8), normal(4, 8)

    def batches() -> Iterator[None]:
        with qv.autocast(recipe=OTHER):
            yield

    held = batches()
    outer = qv.autocast(recipe=RECIPE)
    outer.__enter__()
    layer(x)
    assert margin_of(layer) == 0
    next(held)
    layer(x)
    assert margin_of(layer) == 1
    if inner_first:
        held.close()
        layer(x)
        assert margin_of(layer) == 0
        assert updates(layer) == 0
    outer.__exit__(None, None, None)
    assert updates(layer) == 1
    if not inner_first:  # the generator's own is in force until it is closed
        with launches() as log:
            layer(x)
        assert log[0].kernel == "cast"
        assert margin_of(layer) == 1
        held.close()
        assert updates(layer) == 2
    assert_high_precision_here()
    assert_regions_finalize()


def test_high_precision_after_tasks_whose_regions_interleave() -> None:
    async def task(recipe: Recipe, turns: int) -> None:
        with qv.autocast(recipe=recipe):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(task(RECIPE, 1), task(OTHER, 3), task(RECIPE, 2))

    asyncio.run(main())
    assert_high_precision_here()
    assert_regions_finalize()


def test_an_autocast_entered_twice_is_left_twice() -> None:
    region, layer = qv.autocast(recipe=RECIPE), qv.Linear(8, 8)
    with region:
        with region:
            layer(normal(4, 8))
        assert current_region() is not None
        assert updates(layer) == 0
    assert updates(layer) == 1
    assert_high_precision_here()


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.interrupt = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        if self.interrupt:
            raise KeyboardInterrupt
        return y


@pytest.mark.parametrize("then", [assert_high_precision_here, assert_regions_finalize])
@pytest.mark.parametrize("depth", [1, 2])
def test_high_precision_after_an_interrupted_call(depth: int, then: Callable[[], None]) -> None:
    """A module calls no hooks after a KeyboardInterrupt, as notebooks send it."""
    model: nn.Module = Interrupted()
    part = model
    if depth == 2:
        model = nn.Sequential(model, nn.Linear(8, 8))
        qv.convert(part, RECIPE)
    qv.convert(model, RECIPE)
    with pytest.raises(KeyboardInterrupt):
        model(normal(4, 8))
    then()
    part.interrupt = False
    before = updates(part.proj)
    model(normal(4, 8))
    assert updates(part.proj) == before + 1
    assert_high_precision_here()


# ---- backward passes and other threads


def checkpointed_steps(device: torch.device, infer: Callable[[nn.Module], None]) -> tuple:
    """Gradients of steps with `infer` between forward and backward, and the states after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)
    qv.convert(model, RECIPE)
    found = {}
    for step in range(4):
        x = normal(8, 16, name=f"step {step}").to(device) * (1 + step)
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        infer(model)
        model.zero_grad()
        y.square().sum().backward()
        found.update({f"{step}.{k}": v for k, v in gradients(model).items()})
    assert {updates(model[i], mode) for i in (0, 2) for mode in ("forward", "backward")} == {4}
    return found, scaling(model)


@uncalibrated
@pytest.mark.parametrize("ends", [True, False])
def test_inference_on_another_thread_leaves_a_checkpointed_step_alone(devices, ends: bool) -> None:
    stay, threads = threading.Event(), []

    def infer(model: nn.Module) -> None:
        done = threading.Event()

        def run() -> None:
            with torch.no_grad():
                model(torch.ones(2, 16, device=devices[1]) * 50)
            done.set()
            if not ends:
                stay.wait(20)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        done.wait(20)

    try:
        got = checkpointed_steps(devices[1], infer)
    finally:
        stay.set()
        for thread in threads:
            thread.join()
    expected = checkpointed_steps(devices[1], lambda model: None)
    assert_same(got[0], expected[0])
    assert_same(got[1], expected[1])


def test_backward_scales_wait_for_the_end_of_a_pass_on_another_thread() -> None:
    """A region that is entered meanwhile does not finalize half of them."""
    first, second = qv.Linear(8, 8), qv.Linear(8, 8)
    x = normal(4, 8).requires_grad_()
    with qv.autocast(recipe=RECIPE):
        hidden = first(x)
        y = second(hidden)
    reached, go_on = threading.Event(), threading.Event()

    def wait(grad: torch.Tensor) -> None:
        reached.set()
        go_on.wait(20)

    hidden.register_hook(wait)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    reached.wait(20)
    try:
        with qv.autocast(recipe=RECIPE):
            first(x.detach())
        during = updates(second, "backward"), updates(first, "backward")
    finally:
        go_on.set()
        thread.join()
    assert during == (0, 0)
    assert (updates(second, "backward"), updates(first, "backward")) == (1, 1)
    assert second.recipe_states["backward"].scale[0].item() == 57344


def test_a_pass_that_raised_is_finalized_at_the_next_region() -> None:
    first, second = qv.Linear(8, 8), qv.Linear(8, 8)
    with qv.autocast(recipe=RECIPE):
        hidden = first(normal(4, 8).requires_grad_())
        y = second(hidden)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("user's own")

    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="user's own"):
        y.sum().backward()
    assert updates(second, "backward") == 0
    del y, hidden
    with qv.autocast(recipe=RECIPE):
        pass
    assert (updates(second, "backward"), updates(first, "backward")) == (1, 0)
    assert second.recipe_states["backward"].scale[0].item() == 57344


class CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


@pytest.mark.parametrize("where", ["hook", "function"])
@pytest.mark.parametrize("recipe", [None, RECIPE, OTHER], ids=["outside", "same", "other"])
def test_a_module_called_in_a_backward_pass_is_no_recomputation(where: str, recipe) -> None:
    """Grad mode is off there; the region around the call, or none, is in force."""
    probe, layer = qv.Linear(8, 8), qv.Linear(8, 8)
    x, outputs, kernels = normal(4, 8), [], []

    def call(*args: object) -> None:
        with launches() as log:
            if recipe is None:
                outputs.append(probe(x))
            else:
                with qv.autocast(recipe=recipe):
                    outputs.append(probe(x))
        kernels.extend(launch.kernel for launch in log)
        outputs.append(margin_of(probe))

    for _ in range(2):
        with qv.autocast(recipe=RECIPE):
            hidden = layer(x.clone().requires_grad_())
            y = probe(hidden if where == "hook" else CallsInBackward.apply(hidden, call))
    if where == "hook":
        hidden.register_hook(call)
    y.sum().backward()
    exact = linear(x, probe.weight, probe.bias)
    if recipe is None:
        assert kernels == []
        assert torch.equal(outputs[0], exact)
    else:
        assert kernels == ["cast", "cast", "scaled_mm"]
        assert outputs[1] == recipe.margin
    assert not outputs[0].requires_grad
    assert [updates(m) for m in (probe, layer)] == [2, 2]
    assert [updates(m, "backward") for m in (probe, layer)] == [1, 1]


# ---- inference mode, copies and pickles


def kept_weight(layer: qv.Linear, x: torch.Tensor) -> qv.Linear:
    with qv.autocast(recipe=RECIPE):
        layer(x, is_first_microbatch=True)
    return layer


@uncalibrated
def test_a_weight_kept_in_inference_mode_can_be_trained_with() -> None:
    grads = []
    for mode in (torch.inference_mode, torch.enable_grad):
        torch.manual_seed(0)
        layer, x = qv.Linear(8, 8), normal(4, 8)
        for each in (mode, torch.enable_grad):
            with each(), qv.autocast(recipe=DelayedScaling(amax_history_len=1)):
                y = layer(x.clone().requires_grad_(), is_first_microbatch=each is mode)
        y.sum().backward()
        grads.append(layer.weight.grad)
        assert not layer._weight_cache[0].rowwise.data.is_inference()
    assert (grads[0] - grads[1]).norm() < 0.05 * grads[1].norm()
    assert grads[0].norm() > 1


def quantized_by_convert() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.inference_mode():
        qv.convert(model, RECIPE, weights="quantize")
    return model


def quantized_by_hand() -> nn.Module:
    model = nn.Sequential(qv.Linear(16, 16, recipe=RECIPE))
    with torch.inference_mode():
        model[0].quantize_weight()
    return model


def copied_into() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    qv.convert(model, RECIPE, weights="quantize")
    with torch.inference_mode():
        model[0].weight.copy_(normal(16, 16, name="weight"))
    return model


def loaded() -> nn.Module:
    model, source = nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))
    qv.convert(model, RECIPE, weights="quantize")
    with torch.inference_mode():
        model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("make", [quantized_by_convert, quantized_by_hand, copied_into, loaded])
def test_a_weight_quantized_in_inference_mode_can_be_trained_around(make) -> None:
    """As LoRA does: the input needs its gradient, which is a product with the weight."""
    model = make()
    model[0].weight.requires_grad_(False)
    x, grad = normal(4, 16).requires_grad_(), normal(4, 16, name="grad")
    model(x).backward(grad)
    expected = grad @ model[0].weight.dequantize()
    assert 0 < (x.grad - expected).norm() < 0.1 * expected.norm()
    torch.testing.assert_close(model[0].bias.grad, grad.sum(0))


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "unpickle": by_pickle, "load": by_torch}


@pytest.mark.parametrize("recipe", [RECIPE, NVFP4BlockScaling()], ids=["delayed", "nvfp4"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_in_inference_mode_trains(how: str, recipe: Recipe) -> None:
    """An average of the weights, or the best model so far, is copied while evaluating."""
    layer, x = qv.Linear(16, 16, recipe=recipe), normal(16, 16)
    layer(x).sum().backward()
    layer.zero_grad()
    with torch.inference_mode():
        twin = COPIES[how](layer)
    inputs = [(2 * x).requires_grad_() for _ in range(2)]
    for each, leaf in zip((layer, twin), inputs, strict=True):
        each(leaf).sum().backward()
    assert equal(inputs[0].grad, inputs[1].grad)
    assert_same(scaling(layer), scaling(twin))
    for mode, state in twin.recipe_states.items():
        assert state is not layer.recipe_states[mode]
        if isinstance(recipe, DelayedScaling):
            assert not state.scale.is_inference()


@pytest.mark.parametrize("how", COPIES)
def test_a_module_that_keeps_a_weight_can_be_copied(how: str) -> None:
    x = normal(4, 8)
    layer = kept_weight(qv.Linear(8, 8), x)
    twin = COPIES[how](layer)
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        assert torch.equal(twin(x, is_first_microbatch=False), layer(x, is_first_microbatch=None))
    assert_same(scaling(layer), scaling(twin))


# ---- the warning of uncalibrated inference


def test_the_warning_of_uncalibrated_inference_names_the_users_line() -> None:
    layer = qv.Linear(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), qv.autocast(recipe=RECIPE):
            layer(normal(4, 8))
    assert [each.filename for each in caught] == [__file__]
    assert "no scales yet in Linear(in_features=8" in str(caught[0].message)
