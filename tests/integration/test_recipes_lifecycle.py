"""Every recipe through what happens to a module: copies, checkpoints, moves, other recipes."""

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.nn import base
from quaver.recipe import CustomRecipe, DelayedScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    linear_like,
    scaling,
    train_step,
)
from tests.integration.recipes import RECIPES, STATELESS, TENSORS, mixed, parts
from tests.integration.test_threads import InTurns, in_threads, model_on

Devices = list[torch.device]

every_recipe = pytest.mark.parametrize("name", RECIPES)


def trained(name: str, device: torch.device, *, quantized: bool = False) -> qv.Linear:
    """A layer after a step, with the recipe attached."""
    with qv.quantized_model_init(enabled=quantized, recipe=RECIPES[name]):
        layer = qv.Linear(30, 17, device=device, recipe=RECIPES[name])
    train_step(layer, torch.randn(5, 30, device=device), torch.randn(5, 17), RECIPES[name])
    return layer


def assert_alike(left: qv.Linear, right: qv.Linear, *, steps: int = 2) -> None:
    """Both go on with equal bits."""
    for _ in range(steps):
        x, grad = torch.randn(5, 30), torch.randn(5, 17)
        recipe = left.recipe
        results = [train_step(m, x.to(m.weight.device), grad, recipe) for m in (left, right)]
        assert_same(*results)
        a, b = scaling(left), scaling(right)
        assert a.keys() == b.keys()
        assert all(equal(a[key], b[key]) for key in a)


# ---- copies


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved_whole(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every_recipe
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_whole])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_duplicate_goes_on_with_the_same_bits(
    devices: Devices, name: str, duplicate: Callable[[nn.Module], nn.Module], quantized: bool
) -> None:
    layer = trained(name, devices[1], quantized=quantized)
    twin = duplicate(layer)
    assert_state_devices(twin, devices[1])
    if quantized:
        assert type(twin.weight) is TENSORS[name]
        assert_same(parts(layer.weight), parts(twin.weight))
        for part in parts(twin.weight).values():
            assert part.device == devices[1]
    before = scaling(layer)
    x, grad = torch.randn(5, 30, device=devices[1]), torch.randn(5, 17)
    results = train_step(twin, x, grad, RECIPES[name])
    assert all(equal(value, before[key]) for key, value in scaling(layer).items())
    assert_same(results, train_step(layer, x, grad, RECIPES[name]))
    assert_alike(layer, twin)


@every_recipe
@pytest.mark.parametrize("quantized", [False, True])
def test_a_state_dict_brings_everything(devices: Devices, name: str, quantized: bool) -> None:
    """A run that is resumed from it equals one that was never stopped, random bits included."""
    layer = trained(name, devices[1], quantized=quantized)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    with qv.quantized_model_init(enabled=quantized, recipe=RECIPES[name]):
        twin = qv.Linear(30, 17, device=devices[0], recipe=RECIPES[name])
    assert str(twin.load_state_dict(loaded)) == "<All keys matched successfully>"
    assert type(twin.weight) is type(layer.weight)
    assert_alike(layer, twin)
    assert_state_devices(twin, devices[0])


@every_recipe
@pytest.mark.parametrize("target", [0, "cpu"])
def test_a_move_keeps_what_was_learnt(devices: Devices, name: str, target: int | str) -> None:
    device = torch.device(target) if isinstance(target, str) else devices[target]
    layer = trained(name, devices[1], quantized=True)
    stays = copy.deepcopy(layer)
    layer.to(device)
    assert_state_devices(layer, device)
    assert {part.device for part in parts(layer.weight).values()} == {device}
    assert_same(parts(layer.weight), parts(stays.weight))
    if device.type != "cpu" or devices[0].type == "sim":
        assert_alike(layer, stays)


@every_recipe
def test_made_on_meta(devices: Devices, name: str) -> None:
    source = trained(name, devices[0])
    with torch.device("meta"), qv.quantized_model_init(recipe=RECIPES[name]):
        layer = qv.Linear(30, 17, recipe=RECIPES[name])
    assert type(layer.weight) is TENSORS[name]
    layer.to_empty(device=devices[1])
    layer.reset_parameters()
    with torch.no_grad():
        layer.weight.copy_(source.weight.to(devices[1]))
        layer.bias.copy_(source.bias.to(devices[1]))
    source.quantize_weight()
    assert_same(parts(layer.weight), parts(source.weight))
    x, grad = torch.randn(5, 30), torch.randn(5, 17)
    results = train_step(layer, x.to(devices[1]), grad, RECIPES[name])
    assert_state_devices(layer, devices[1])
    with qv.quantized_model_init(recipe=RECIPES[name]):
        fresh = qv.Linear(30, 17, device=devices[0], recipe=RECIPES[name])
    fresh.load_state_dict(source.state_dict() | {"_extra_state": fresh.get_extra_state()})
    assert_same(results, train_step(fresh, x.to(devices[0]), grad, RECIPES[name]))


# ---- another recipe midway


@pytest.mark.parametrize("before", RECIPES)
def test_every_change_of_class_warns_once_and_works(
    devices: Devices, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_warned_changes", set())
    x, grad = torch.randn(5, 30, device=devices[1]), torch.randn(5, 17)
    for after in RECIPES:
        if after == before:
            continue
        layer = qv.Linear(30, 17, device=devices[1])
        fresh = linear_like(layer, devices[1])
        train_step(layer, x, grad, RECIPES[before])
        old, new = (type(RECIPES[n]).__name__ for n in (before, after))
        with pytest.warns(UserWarning, match=f"the recipe changes from {old} to {new}: "):
            results = train_step(layer, x, grad, RECIPES[after])
        assert_same(results, train_step(fresh, x, grad, RECIPES[after]))
        assert_state_devices(layer, devices[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(layer, x, grad, RECIPES[before])
            train_step(layer, x, grad, RECIPES[after])
            train_step(layer, x, grad, RECIPES[after])
        assert [str(w.message).split(":")[0] for w in caught] in (
            [f"the recipe changes from {new} to {old}"],
            [],  # an earlier turn of the loop said so
        )


@pytest.mark.filterwarnings("ignore:the recipe changes")
def test_a_kept_weight_is_dropped_with_the_recipe(devices: Devices) -> None:
    layer = qv.Linear(32, 16, device=devices[1])
    x = torch.randn(4, 32, device=devices[1])
    with torch.no_grad():
        with qv.autocast(recipe=RECIPES["current"]):
            layer(x, is_first_microbatch=True)
        with qv.autocast(recipe=RECIPES["mxfp8"]):
            assert equal(layer(x, is_first_microbatch=False), layer(x))


def test_other_fields_of_the_same_class_take_effect(devices: Devices) -> None:
    layer = qv.Linear(32, 16, device=devices[1])
    x, grad = torch.randn(4, 32, device=devices[1]), torch.randn(4, 16)
    for recipe in (
        MXFP8BlockScaling(),
        MXFP8BlockScaling(fp8_format=Format.HYBRID),
        MXFP8BlockScaling(backward_override="high_precision"),
    ):
        fresh = linear_like(layer, devices[1])
        results = train_step(layer, x, grad, recipe)
        assert_same(results, train_step(fresh, x, grad, recipe))


def test_seeds_differ_and_equal_seeds_do_not(devices: Devices) -> None:
    layer = qv.Linear(32, 16, device=devices[1])
    x, grad = torch.randn(4, 32, device=devices[1]), torch.randn(4, 16)
    results = [
        train_step(linear_like(layer, devices[1]), x, grad, NVFP4BlockScaling(seed=seed))
        for seed in (1, 1, 2)
    ]
    assert_same(results[0], results[1])
    assert equal(results[0]["y"], results[2]["y"])
    assert not equal(results[0]["dx"], results[2]["dx"])


def test_layers_with_names_draw_bits_of_their_own(devices: Devices) -> None:
    """Two layers of one shape with equal weights, inputs and gradients round apart."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model.to(devices[1])
    model[1].load_state_dict(model[0].state_dict())
    qv.convert(model, NVFP4BlockScaling())
    x, grad = torch.randn(4, 32, device=devices[1]), torch.randn(4, 32)
    first, second = (train_step(layer, x, grad, layer.recipe) for layer in model)
    assert equal(first["y"], second["y"])
    assert not equal(first["dx"], second["dx"])


# ---- threads


@every_recipe
@pytest.mark.parametrize("same_device", [False, True])
def test_two_threads_equal_two_sequential_runs(
    devices: Devices, name: str, same_device: bool
) -> None:
    places = [devices[1], devices[1] if same_device else devices[0]]
    models = [model_on(device) for device in places]
    twins = [copy.deepcopy(model) for model in models]
    other = DelayedScaling(amax_history_len=2) if name != "delayed" else MXFP8BlockScaling()
    recipes = (RECIPES[name], other)
    inputs = [[torch.randn(4, 16) * 4.0**i for _ in range(3)] for i in range(2)]
    grad, barrier = torch.randn(4, 16), threading.Barrier(2)

    def job(i: int, model: nn.Module) -> list[dict[str, torch.Tensor]]:
        return [train_step(model, x.to(places[i]), grad, recipes[i]) for x in inputs[i]]

    with launches() as log:
        together = in_threads(*(lambda i=i: job(i, InTurns(models[i], barrier)) for i in range(2)))
    assert_guarded(log, places, least=2 * 3 * 10)
    for i, twin in enumerate(twins):
        for mine, expected in zip(together[i], job(i, twin), strict=True):
            assert_same({k.removeprefix("model."): v for k, v in mine.items()}, expected)


@pytest.mark.parametrize("name", STATELESS)
def test_a_backward_on_another_thread(devices: Devices, name: str) -> None:
    model = model_on(devices[1])
    twin = copy.deepcopy(model)
    x, grad = torch.randn(4, 16, device=devices[1]), torch.randn(4, 16)
    expected = train_step(twin, x, grad, RECIPES[name])
    with qv.autocast(recipe=RECIPES[name]):
        y = model(x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.backward, grad.to(devices[1])).result(timeout=60)
    assert equal(model[0].weight.grad, expected["0.weight"])


# ---- recipes as values


def test_a_custom_recipe_is_a_value() -> None:
    recipe = CustomRecipe(mixed)
    assert recipe == CustomRecipe(mixed) == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(CustomRecipe(mixed))
    assert recipe != CustomRecipe(lambda role: None)
    assert copy.deepcopy(recipe) == recipe
