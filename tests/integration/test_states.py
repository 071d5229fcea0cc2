"""The rules of scaling states: when they are updated, from what, and under which recipe."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.scaling import RecipeState, finalize
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    equal,
    linear_like,
    scaling,
    train_step,
)

Devices = list[torch.device]


def forward_state(layer: qv.Linear) -> RecipeState:
    return layer.recipe_states["forward"]


def filled(value: float, device: torch.device, rows: int = 2) -> torch.Tensor:
    return torch.full((rows, 16), value, device=device)


def step(layer: nn.Module, value: float, recipe: DelayedScaling | None = None) -> torch.Tensor:
    """One training step on an input whose amax is `value`; gradient of ones."""
    x = filled(value, next(layer.parameters()).device)
    return train_step(layer, x, torch.ones(2, 16), recipe)["y"]


# ---- the update


@pytest.mark.parametrize("margin", [0, 2, -1])
def test_margin_divides_the_scale(devices: Devices, margin: int) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 4.0, DelayedScaling(margin=margin, amax_history_len=2))
    assert forward_state(layer).scale[0].item() == 448 / 4 * 2.0**-margin
    assert layer.recipe_states["backward"].scale[0].item() == 57344 * 2.0**-margin
    assert forward_state(layer).scale[2].item() == 1.0  # the output's slot: never cast


def test_the_newest_amax_sits_at_the_end_and_row_0_is_free(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=4)
    for value in (1.0, 8.0, 2.0, 4.0, 3.0):
        step(layer, value, recipe)
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 2, 4, 3]
    # "max" is over all old entries and the newest: 8 leaves the window with this update
    assert forward_state(layer).scale[0].item() == 448 / 8
    step(layer, 1.0, recipe)
    assert forward_state(layer).scale[0].item() == 448 / 4


def test_a_history_of_one_is_zero_after_an_update(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 4.0, DelayedScaling(amax_history_len=1))
    assert forward_state(layer).amax_history.tolist() == [[0, 0, 0]]
    assert forward_state(layer).scale[0].item() == 448 / 4


def test_another_history_length_keeps_the_newest(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        step(layer, value, DelayedScaling(amax_history_len=5))
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 2, 3, 4, 5]
    step(layer, 1.0, DelayedScaling(amax_history_len=3))
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 5, 1]
    assert forward_state(layer).scale[0].item() == torch.tensor(448 / 5).item()
    step(layer, 2.0, DelayedScaling(amax_history_len=6))
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 0, 0, 5, 1, 2]
    assert layer.recipe_states["backward"].amax_history.shape == (6, 2)


def test_another_margin_takes_effect_at_the_next_region(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 4.0, DelayedScaling(amax_history_len=4))
    step(layer, 2.0, DelayedScaling(amax_history_len=4, margin=1))
    assert forward_state(layer).scale[0].item() == 448 / 4 / 2
    step(layer, 2.0, DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"))
    assert forward_state(layer).scale[0].item() == 448 / 2
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 4, 2, 2]


def test_an_unseen_tensor_neither_rolls_nor_changes(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=3)
    step(layer, 4.0, recipe)
    before = scaling(layer)
    step(layer, 0.0, recipe)  # an amax of 0 is that of a tensor not seen
    after = scaling(layer)
    assert equal(after[".forward.scale"][0], before[".forward.scale"][0])
    rolled = [history[:, 0].tolist() for history in (before[".forward.amax_history"],) * 2]
    assert after[".forward.amax_history"][:, 0].tolist() == rolled[0] == [0, 0, 4]
    assert after[".forward.amax_history"][1, 1] == before[".forward.amax_history"][2, 1] > 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_values_do_not_freeze_the_scale(devices: Devices, bad: float) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=4)
    step(layer, 4.0, recipe)
    step(layer, bad, recipe)
    assert forward_state(layer).scale[0].item() == 448 / 4
    step(layer, 8.0, recipe)  # the window still holds the inf
    assert forward_state(layer).scale[0].item() == 448 / 8
    for _ in range(4):
        step(layer, 2.0, recipe)
    assert forward_state(layer).scale[0].item() == 448 / 2


def test_most_recent_keeps_the_scale_where_the_newest_is_inf(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    for value, expected in ((4.0, 4.0), (torch.inf, 4.0), (2.0, 2.0)):
        step(layer, value, recipe)
        assert forward_state(layer).scale[0].item() == 448 / expected


def test_a_scale_that_overflows_is_the_largest_float32(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 1e-38, DelayedScaling(amax_history_len=2))
    assert forward_state(layer).scale[0].item() == torch.finfo(torch.float32).max


def test_functions_of_the_users(devices: Devices) -> None:
    seen: list[Any] = []

    def amax(history: torch.Tensor) -> torch.Tensor:
        seen.append(history.clone())
        return history.amax(0) * 2

    def scale(amax: torch.Tensor, old: torch.Tensor, fp8_max: float, recipe: Any) -> torch.Tensor:
        seen.append((old.clone(), fp8_max, recipe))
        return torch.where(amax > 0, fp8_max / amax / 4, old)

    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=amax, scaling_factor_compute_algo=scale
    )
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 4.0, recipe)
    assert forward_state(layer).scale[0].item() == 448 / 8 / 4
    seen.clear()
    with qv.autocast(recipe=recipe):
        layer(filled(2.0, devices[1]))
    history, (old, fp8_max, passed) = seen
    assert history.device == old.device == devices[1]
    assert history[:, 0].tolist() == [2, 0, 4]  # as before the roll: the newest in row 0
    assert (old[0].item(), fp8_max) == (448 / 8 / 4, 448.0)
    assert passed is recipe


def test_recipes_that_differ_in_a_callable_do_not_share_state(devices: Devices) -> None:
    def double(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0) * 2

    def quadruple(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0) * 4

    layers = [qv.Linear(16, 16, device=device) for device in devices]
    recipes = [DelayedScaling(amax_compute_algo=function) for function in (double, quadruple)]
    assert recipes[0] != recipes[1]
    with qv.autocast(recipe=recipes[0]):
        layers[0](filled(1.0, devices[0]))
        with qv.autocast(recipe=recipes[1]):
            layers[1](filled(1.0, devices[1]))
    assert forward_state(layers[0]).scale[0].item() == 448 / 2
    assert forward_state(layers[1]).scale[0].item() == 448 / 4


# ---- grad mode, calibration, first use


def test_no_grad_updates_nothing_and_leaks_nothing(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=3)
    step(layer, 1.0, recipe)
    before = scaling(layer)
    with torch.no_grad(), qv.autocast(recipe=recipe):
        layer(filled(100.0, devices[1]))
    assert_same(scaling(layer), before)
    with torch.no_grad(), qv.autocast(recipe=recipe), torch.enable_grad():
        layer(filled(100.0, devices[1]))  # recorded, but grad mode is off at the exit
    assert_same(scaling(layer), before)
    with qv.autocast(recipe=recipe):
        with torch.no_grad():
            layer(filled(100.0, devices[1]))
        layer(filled(2.0, devices[1]))
    assert forward_state(layer).amax_history[:, 0].tolist() == [0, 1, 2]
    assert forward_state(layer).scale[0].item() == 448 / 2


def test_inference_mode_updates_nothing(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 1.0)
    before = scaling(layer)
    with torch.inference_mode(), qv.autocast():
        y = layer(filled(1.0, devices[1]))
    assert y.device == devices[1]
    assert_same(scaling(layer), before)
    step(layer, 2.0)
    assert forward_state(layer).scale[0].item() == 448 / 2


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
def test_a_state_made_in_inference_mode_learns_outside_of_it(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    with torch.inference_mode(), qv.autocast():
        layer(filled(1.0, devices[1]))
    step(layer, 2.0)
    assert forward_state(layer).scale[0].item() == 448 / 2


def test_eval_mode_does_not_matter(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1]).eval()
    step(layer, 4.0, DelayedScaling())
    assert forward_state(layer).scale[0].item() == 448 / 4


@pytest.mark.parametrize("grad", [False, True])
def test_calibration_computes_in_high_precision_and_learns(devices: Devices, grad: bool) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    plain = nn.Linear(16, 16, device=devices[1])
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "extra" not in k})
    x = torch.randn(4, 16, device=devices[1])
    recipe = DelayedScaling(amax_history_len=3)
    with torch.set_grad_enabled(grad):
        with launches() as log, qv.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = layer(x)
        assert equal(y, plain(x))
    assert {launch.kernel for launch in log} == {"amax", "scale_update"}
    state = forward_state(layer)
    assert state.scale.device == devices[1]
    assert equal(state.amax_history[-1, 0], x.abs().max())
    assert equal(state.scale[1], torch.tensor(448.0) / layer.weight.detach().abs().max().cpu())
    with torch.no_grad(), qv.autocast(recipe=recipe):
        layer(x)  # and inference does not warn


def test_a_first_use_takes_the_tensors_own_amax(devices: Devices) -> None:
    x = torch.randn(4, 16, device=devices[1]) * 0.01
    layer = qv.Linear(16, 16, device=devices[1])
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.zero_()
    exact = nn.functional.linear(x, layer.weight)
    errors = {}
    for first_scale in ("amax", "one"):
        with qv.autocast(recipe=DelayedScaling(first_scale=first_scale)):
            y = linear_like(layer, devices[1])(x)
        errors[first_scale] = ((y - exact).norm() / exact.norm()).item()
    assert errors["amax"] < 0.05
    assert errors["one"] > 0.2  # subnormals of E4M3


def test_uncalibrated_inference_warns_once_and_names_the_modules(devices: Devices) -> None:
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False, device=devices[1]) for _ in range(2)))
    model = copy.deepcopy(plain)
    qv.convert(model, DelayedScaling())
    x = torch.randn(8, 16, device=devices[1]) * 1e-3  # subnormal in E4M3, if its scale were 1
    with torch.no_grad():
        exact = plain(x)
        with launches() as log, pytest.warns(UserWarning, match="no scales yet in 0, 1") as caught:
            y = model(x)
        assert len(caught) == 1
        again = model(x)
    assert [launch.kernel for launch in log].count("scaled_mm") == 2
    assert equal(y, again)
    assert (y - exact).norm() / exact.norm() < 0.1
    assert forward_state(model[0]).scale[0].item() == 1.0  # nothing was learnt


# ---- regions


def test_only_the_outermost_region_finalizes(devices: Devices) -> None:
    layers = [qv.Linear(16, 16, device=device) for device in devices]
    recipe = DelayedScaling()
    with launches() as log, qv.autocast(recipe=recipe):
        with qv.autocast(recipe=recipe):
            layers[0](filled(2.0, devices[0]))
        assert "scale_update" not in {launch.kernel for launch in log}
        layers[1](filled(4.0, devices[1]))
    assert [launch.device for launch in log if launch.kernel == "scale_update"] == devices
    assert [forward_state(layer).scale[0].item() for layer in layers] == [448 / 2, 448 / 4]


def test_states_on_one_device_need_no_grouping(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("grouped")

    monkeypatch.setattr(finalize, "group_by_device", refuse)
    layers = nn.Sequential(*(qv.Linear(16, 16, device=devices[1]) for _ in range(2)))
    with launches() as log:
        step(layers, 2.0)
    assert [launch.kernel for launch in log].count("scale_update") == 2
    assert forward_state(layers[0]).scale[0].item() == 448 / 2
    split = nn.ModuleList(qv.Linear(16, 16, device=device) for device in devices)
    region = qv.autocast()
    region.__enter__()
    for layer, device in zip(split, devices, strict=True):
        layer(filled(1.0, device))
    with pytest.raises(AssertionError, match="grouped"):
        region.__exit__(None, None, None)


def test_the_innermost_region_says_which_recipe(devices: Devices) -> None:
    outer, inner = DelayedScaling(margin=1), DelayedScaling(margin=2)
    attached = DelayedScaling(margin=3)
    layer = qv.Linear(16, 16, device=devices[1])
    own = qv.Linear(16, 16, device=devices[1], recipe=attached)
    x = filled(1.0, devices[1])

    def recipe_of(module: qv.Linear) -> DelayedScaling | None:
        with launches() as log:
            module(x)
        ran = "scaled_mm" in {launch.kernel for launch in log}
        return module.recipe_states["forward"].recipe if ran else None

    assert recipe_of(layer) is None
    assert recipe_of(own) == attached
    with qv.autocast(recipe=outer):
        assert recipe_of(layer) == recipe_of(own) == outer
        with qv.autocast(recipe=inner):
            assert recipe_of(layer) == recipe_of(own) == inner
        with qv.autocast(enabled=False):
            assert recipe_of(layer) is recipe_of(own) is None
            with qv.autocast(recipe=inner):
                assert recipe_of(layer) == inner
        with qv.autocast():
            assert recipe_of(layer) == DelayedScaling()
            assert recipe_of(own) == attached
        assert recipe_of(layer) == outer
    with qv.autocast(enabled=False):
        assert recipe_of(own) is None
    assert recipe_of(own) == attached


def test_an_error_inside_leaves_no_region(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    with pytest.raises(ValueError, match="x must have 16 features"), qv.autocast():
        layer(torch.zeros(2, 15, device=devices[1]))
    with launches() as log:
        layer(filled(4.0, devices[1]))
    assert log == []


def test_a_deep_copy_made_after_a_forward_keeps_learning(devices: Devices) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    layer = qv.Linear(16, 16, device=devices[1])
    step(layer, 4.0, recipe)
    twin = copy.deepcopy(layer)
    assert_same(scaling(twin), scaling(layer))
    before = scaling(layer)
    step(twin, 8.0, recipe)
    assert forward_state(twin).scale[0].item() == 448 / 8
    assert forward_state(twin).amax_history[:, 0].tolist() == [0, 4, 8]
    assert_same(scaling(layer), before)
    del layer
    gc.collect()
    step(twin, 16.0, recipe)
    assert forward_state(twin).scale[0].item() == 448 / 16


# ---- microbatches


def test_microbatches_quantize_the_weight_once(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    for _ in range(2):
        casts = []
        for i in range(3):
            with launches() as log, qv.autocast():
                y = layer(filled(1.0 + i, devices[1]), is_first_microbatch=i == 0)
                y.sum().backward()
            casts.append(sum(launch.kernel in ("cast", "cast_grad") for launch in log))
            assert_guarded(log, [devices[1]])
        assert casts == [3, 2, 2]  # input and gradient each time, the weight once
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == devices[1]


def move(layer: qv.Linear, device: torch.device) -> None:
    layer.to(device)


def move_parameters(layer: qv.Linear, device: torch.device) -> None:
    """As accelerate's hooks do."""
    for name, parameter in list(layer._parameters.items()):
        layer._parameters[name] = nn.Parameter(parameter.detach().to(device))


def change_dtype(layer: qv.Linear, device: torch.device) -> None:
    layer.to(torch.bfloat16)
    layer.to(torch.float32)
    move_parameters(layer, device)


@pytest.mark.parametrize("change", [move, move_parameters, change_dtype])
def test_a_cached_weight_does_not_outlive_a_change(
    devices: Devices, change: Callable[[qv.Linear, torch.device], None]
) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    with qv.autocast():
        layer(filled(1.0, devices[1]), is_first_microbatch=True)
    target = devices[1] if change is change_dtype else devices[0]
    change(layer, target)
    with launches() as log, qv.autocast():
        layer(filled(1.0, target), is_first_microbatch=False)
    assert_guarded(log, [target], least=4)
    assert [launch.kernel for launch in log].count("cast") == 2


def test_cached_weights_give_the_same_bits_as_fresh_ones(devices: Devices) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    layers = [qv.Linear(16, 16, device=devices[1])]
    layers.append(copy.deepcopy(layers[0]))
    x = torch.randn(4, 16, device=devices[1])
    for layer in layers:
        step(layer, 4.0, recipe)
    with qv.autocast(recipe=recipe):  # one region: the scales stay
        results = [
            [layers[0](x * k) for k in range(3)],
            [layers[1](x * k, is_first_microbatch=k == 0) for k in range(3)],
        ]
    assert all(equal(a, b) for a, b in zip(*results, strict=True))
    assert_same(scaling(layers[0]), scaling(layers[1]))
    with torch.no_grad():
        layers[1].weight.zero_()
    with qv.autocast(recipe=recipe):
        assert layers[1](x, is_first_microbatch=False).abs().max() > 1
        assert equal(layers[1](x, is_first_microbatch=True), layers[1].bias.expand(4, 16))


def test_a_dataparallel_replica_outside_any_region_raises(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight, layer.bias
    with pytest.raises(qv.RecipeError, match=r"replica of nn\.DataParallel"):
        replica(filled(1.0, devices[1]))
    with qv.autocast():
        assert replica(filled(1.0, devices[1])).device == devices[1]
