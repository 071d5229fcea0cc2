"""Regions: which recipe is in force, what is recorded, and when scales are updated."""

import threading
import warnings

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.scaling import close_call_region, current_region, open_call_region
from quaver.testing import launches
from tests.samples import normal

RECIPE = DelayedScaling(amax_history_len=4)


def layer(**options) -> qv.Linear:
    torch.manual_seed(0)
    return qv.Linear(16, 8, **options)


def updates(module: qv.Linear, mode: str = "forward") -> int:
    return module.recipe_states[mode].updates


def accumulated(module: qv.Linear) -> list[float]:
    return module.recipe_states["forward"].amax_history[0].tolist()


def newest(module: qv.Linear) -> list[float]:
    return module.recipe_states["forward"].amax_history[-1].tolist()


def in_fp8(run) -> bool:
    with launches() as log:
        run()
    return "scaled_mm" in [entry.kernel for entry in log]


X = normal(4, 16, name="x")
AMAX = X.abs().max().item()


# ---- which recipe


def test_nothing_is_quantized_outside_of_a_region() -> None:
    module = layer()
    assert not in_fp8(lambda: module(X))
    assert module.recipe_states == {}


@pytest.mark.parametrize("attached", [None, RECIPE])
def test_a_disabled_region_is_high_precision(attached) -> None:
    module = layer(recipe=attached)
    with qv.autocast(enabled=False):
        assert not in_fp8(lambda: module(X))
        assert torch.equal(module(X), nn.functional.linear(X, module.weight, module.bias))


def test_the_innermost_region_counts() -> None:
    module = layer()
    inner = DelayedScaling(amax_history_len=7)
    with qv.autocast(recipe=RECIPE):
        module(X)
        assert module.recipe_states["forward"].recipe is RECIPE
        with qv.autocast(enabled=False):
            assert not in_fp8(lambda: module(X))
            with qv.autocast(recipe=inner):
                assert in_fp8(lambda: module(X))
                assert module.recipe_states["forward"].recipe is inner
        assert in_fp8(lambda: module(X))


def test_a_region_without_a_recipe_takes_the_attached_one_else_the_default() -> None:
    attached, plain = layer(recipe=RECIPE), layer()
    with qv.autocast():
        attached(X), plain(X)
    assert attached.recipe_states["forward"].recipe is RECIPE
    assert plain.recipe_states["forward"].recipe == DelayedScaling()
    named = DelayedScaling(margin=1)
    with qv.autocast(recipe=named):
        attached(X)
    assert attached.recipe_states["forward"].recipe is named


def test_autocast_is_a_decorator_too_and_can_be_entered_again() -> None:
    module = layer()
    region = qv.autocast(recipe=RECIPE)

    @region
    def run() -> torch.Tensor:
        return module(X)

    assert in_fp8(run)
    with region, region:
        assert in_fp8(lambda: module(X))
    assert current_region() is None
    assert updates(module) == 2


def test_a_region_ends_also_on_an_error() -> None:
    with pytest.raises(KeyError), qv.autocast(), qv.autocast(enabled=False):
        raise KeyError
    assert current_region() is None


# ---- when


def test_scales_are_updated_once_at_the_exit_of_the_outermost() -> None:
    module = layer()
    with qv.autocast(recipe=RECIPE):
        with qv.autocast(recipe=RECIPE):
            module(X)
        assert updates(module) == 0
        module(X * 2)
        assert updates(module) == 0
        assert accumulated(module)[0] == 2 * AMAX
    assert updates(module) == 1
    assert accumulated(module) == [0.0] * 3
    assert newest(module)[:2] == [2 * AMAX, module.weight.abs().max().item()]
    scale = module.recipe_states["forward"].scale
    assert scale[0].item() == (torch.tensor(448.0) / (2 * AMAX)).item()
    assert scale[2].item() == 1.0, "the output's slot is not used"


def test_a_disabled_region_outside_does_not_collect() -> None:
    module = layer()
    with qv.autocast(enabled=False):
        with qv.autocast(recipe=RECIPE):
            module(X)
        assert updates(module) == 1
        with qv.autocast(recipe=RECIPE):
            module(X)
        assert updates(module) == 2


def test_only_what_was_used_is_updated() -> None:
    used, idle = layer(), layer()
    with qv.autocast(recipe=RECIPE):
        used(X), idle(X)
    with qv.autocast(recipe=RECIPE):
        used(X)
    assert (updates(used), updates(idle)) == (2, 1)


def test_eval_mode_does_not_matter() -> None:
    module = layer().eval()
    with qv.autocast(recipe=RECIPE):
        module(X)
    assert updates(module) == 1


def trained() -> qv.Linear:
    """A layer that knows its scales."""
    module = layer()
    with qv.autocast(recipe=RECIPE):
        module(X)
    return module


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_or_updated_without_grad(mode) -> None:
    module = trained()
    scale = module.recipe_states["forward"].scale.clone()
    with mode(), qv.autocast(recipe=RECIPE):
        module(X * 100)
    assert updates(module) == 1
    assert accumulated(module) == [0.0] * 3
    with qv.autocast(recipe=RECIPE):
        module(X)
    assert newest(module)[0] == AMAX
    assert torch.equal(module.recipe_states["forward"].scale, scale)


def test_a_validation_inside_a_training_region_does_not_leak() -> None:
    module = trained()
    with qv.autocast(recipe=RECIPE):
        with torch.no_grad():
            module(X * 100)
        module(X)
    assert newest(module)[0] == AMAX


def test_what_was_recorded_is_dropped_when_grad_is_off_at_the_exit() -> None:
    module = trained()
    region = qv.autocast(recipe=RECIPE)
    region.__enter__()
    module(X * 4)
    recorded = accumulated(module)[0]
    with torch.no_grad():
        region.__exit__(None, None, None)
    assert recorded == 4 * AMAX
    assert accumulated(module) == [0.0] * 3
    assert updates(module) == 1


def test_backward_scales_are_updated_once_a_backward_pass() -> None:
    first, second = layer(), qv.Linear(8, 8)
    for step in range(1, 4):
        with qv.autocast(recipe=RECIPE):
            y = second(first(X))
            assert updates(first, "backward") == step - 1
        y.square().sum().backward()
        assert (updates(first, "backward"), updates(second, "backward")) == (step, step)
    history = second.recipe_states["backward"].amax_history
    assert history[0].tolist() == [0.0, 0.0]
    assert history[-1, 0].item() > 0
    assert history[-1, 1].item() == 0


# ---- calibration and first use


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_calibration_records_in_high_precision_and_updates_at_its_exit(mode) -> None:
    module = layer()
    with mode(), qv.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = module(X)
    assert torch.equal(y, nn.functional.linear(X, module.weight, module.bias))
    state = module.recipe_states["forward"]
    assert newest(module)[:2] == [AMAX, module.weight.abs().max().item()]
    assert state.scale[0].item() == (torch.tensor(448.0) / AMAX).item()
    with warnings.catch_warnings(), torch.no_grad(), qv.autocast(recipe=RECIPE):
        warnings.simplefilter("error")
        module(X)


def test_inference_that_goes_on_uncalibrated_warns_once_with_the_names() -> None:
    modules = [layer() for _ in range(2)]
    for i, module in enumerate(modules):
        module.qualified_name = f"block.{i}.proj"
    warning = pytest.warns(UserWarning, match=r"no scales yet in block\.0\.proj, block\.1\.proj")
    with warning, torch.no_grad(), qv.autocast(recipe=RECIPE):
        outputs = [module(X) for module in modules]
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        again = [module(X) for module in modules]
    exact = nn.functional.linear(X, modules[0].weight, modules[0].bias)
    assert torch.equal(torch.stack(outputs), torch.stack(again))
    assert (outputs[0] - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("first_scale", "low", "high"), [("amax", 0.0, 0.05), ("one", 0.2, 2.0)])
def test_the_first_training_step_of_small_values(first_scale: str, low: float, high: float) -> None:
    """Their own amax keeps them; a scale of 1 throws them into E4M3's subnormals. No warning."""
    module, x = layer(bias=False), X * 2e-3
    with qv.autocast(recipe=DelayedScaling(first_scale=first_scale)):
        y = module(x)
    exact = nn.functional.linear(x, module.weight)
    assert low < (y - exact).norm() / exact.norm() < high


# ---- a call of a module with an attached recipe


def test_a_call_of_a_module_with_a_recipe_is_a_region_of_its_own() -> None:
    module = layer(recipe=RECIPE)
    for step in range(1, 4):
        assert in_fp8(lambda: module(X))
        assert updates(module) == step
        assert current_region() is None


def test_a_call_region_opens_only_where_there_is_none() -> None:
    outer, inner = layer(), layer()
    open_call_region(outer)
    region = current_region()
    open_call_region(inner)
    still = current_region()
    close_call_region(inner)
    left_alone = current_region()
    close_call_region(outer)
    assert region is still is left_alone
    assert region.owner is outer
    assert region.by_call
    assert current_region() is None
    with qv.autocast(enabled=False):
        mine = current_region()
        open_call_region(outer)
        assert current_region() is mine
        close_call_region(outer)
        assert current_region() is mine


def test_a_module_that_calls_itself_closes_its_region_at_the_outer_exit() -> None:
    module = layer()
    for _ in range(2):
        open_call_region(module)
    close_call_region(module)
    still = current_region()
    close_call_region(module)
    assert still is not None
    assert current_region() is None


def test_without_a_recipe_a_call_region_leaves_a_module_in_high_precision() -> None:
    """Only `autocast` stands for a default."""
    whole, plain, named = layer(), layer(), layer(recipe=RECIPE)
    open_call_region(whole)
    try:
        quantized = [in_fp8(lambda m=m: m(X)) for m in (plain, named)]
    finally:
        close_call_region(whole)
    assert quantized == [False, True]
    assert plain.recipe_states == {}
    assert updates(named) == 1


# ---- threads


def test_regions_are_per_thread(devices) -> None:
    recipes = [DelayedScaling(amax_history_len=n) for n in (2, 5)]
    modules = [qv.Linear(16, 8, device=device) for device in devices]
    barrier, outside = threading.Barrier(2), []

    def work(i: int) -> None:
        x = X.to(devices[i])
        for _ in range(10):
            with qv.autocast(recipe=recipes[i]):
                barrier.wait(10)
                modules[i](x)
                barrier.wait(10)
            outside.append(current_region())

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outside == [None] * 20
    for i, module in enumerate(modules):
        assert module.recipe_states["forward"].recipe is recipes[i]
        assert updates(module) == 10
    with qv.autocast(recipe=RECIPE):
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(current_region()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("context", [qv.autocast, qv.quantized_model_init])
@pytest.mark.parametrize("enabled", [DelayedScaling(), "false", None])
def test_a_recipe_in_the_switch_s_place_is_refused(context, enabled) -> None:
    with pytest.raises(qv.RecipeError, match="enabled must be True or False"):
        context(enabled)
