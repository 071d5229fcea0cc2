"""accelerate: its checkpoint loader, tied weights, offload to disk, and the Accelerator."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import (
    Accelerator,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.utils import find_tied_parameters
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling, Float8CurrentScaling, named_recipe
from quaver.testing import launches
from tests.conversion.models import Mlp, calibrate, tiny_llama, tokens
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    quantized_modules,
    scaling,
    train_step,
)
from tests.integration.recipes import parts

RECIPE = DelayedScaling(amax_history_len=4)

Devices = list[torch.device]


def halves(devices: Devices) -> dict[str, torch.device]:
    return {"fc1": devices[0], "fc2": devices[1], "lm_head": devices[1]}


def converted(recipe: qv.recipe.Recipe = RECIPE, weights: str = "keep") -> Mlp:
    model = Mlp()
    qv.convert(model, recipe, weights=weights)
    return model


def trained(recipe: qv.recipe.Recipe = RECIPE) -> Mlp:
    model = converted(recipe)
    for size in (1.0, 4.0):
        train_step(model, size * torch.randn(4, 16), torch.randn(4, 64), recipe)
    return model


@pytest.mark.parametrize(
    ("place", "empty"),
    [("two", True), ("two", False), ("one", True), ("one", False), ("none", False)],
)
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_checkpoint_with_scales_is_loaded_onto_devices(
    devices: Devices, tmp_path: Path, recipe: str, place: str, empty: bool
) -> None:
    chosen = RECIPE if recipe == "delayed" else named_recipe(recipe)
    source = trained(chosen)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    places = {"two": halves(devices), "one": {"": devices[1]}, "none": None}[place]
    if empty:
        with init_empty_weights():
            target = Mlp()
        qv.convert(target, chosen)
    else:
        target = converted(chosen)
    target = load_checkpoint_and_dispatch(target, str(tmp_path), device_map=places)
    if recipe == "delayed":
        assert_same(scaling(target), scaling(source))
    x = torch.randn(4, 16)
    main = devices[0] if place == "two" else torch.device("cpu")
    main = devices[1] if place == "one" else main
    with torch.no_grad(), launches() as log:
        y = target(x.to(main))
    with torch.no_grad():
        assert equal(y, copy.deepcopy(source).to(main)(x.to(main)))
    expected = {"two": devices, "one": [devices[1]], "none": [torch.device("cpu")]}[place]
    assert_guarded(log, expected)
    for layer, device in zip(quantized_modules(target).values(), (expected * 2)[:2], strict=True):
        assert_state_devices(layer, device)
    assert_same(scaling(target), scaling(source))
    assert "_extra_state" not in dict(target.fc1.named_buffers())


def test_scales_that_go_to_disk_with_their_weights_are_read_there(tmp_path: Path) -> None:
    source = trained()
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    target = load_checkpoint_and_dispatch(
        converted(),
        str(tmp_path),
        device_map={"fc1": "disk", "fc2": "cpu", "lm_head": "cpu"},
        offload_folder=str(tmp_path / "offload"),
    )
    assert target.fc1.weight.device.type == "meta"
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert equal(target(x), source(x))
    assert_same(scaling(target), scaling(source))


def test_scales_on_disk_that_cannot_be_found_are_named(tmp_path: Path) -> None:
    layer = converted().fc1
    layer._buffers["_extra_state"] = torch.empty(8, dtype=torch.uint8, device="meta")
    with (
        pytest.warns(UserWarning, match=r"the scales of fc1 went to disk .* not found there"),
        torch.no_grad(),
    ):
        calibrate(layer, torch.randn(4, 16))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_vanilla_checkpoint_into_a_converted_model(
    devices: Devices, tmp_path: Path, empty: bool, recipe: str
) -> None:
    """The values that were there before, and the scales that fitted them, are gone."""
    source = Mlp()
    with torch.no_grad():
        source.fc1.weight.mul_(1000)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    target = Mlp()
    if empty:
        with init_empty_weights():
            target = Mlp()
    qv.convert(target, named_recipe(recipe))
    target = load_checkpoint_and_dispatch(target, str(tmp_path), device_map=halves(devices))
    qv.convert(source.to(devices[0]), named_recipe(recipe))
    x = torch.randn(4, 16, device=devices[0])
    for each in (source, target):
        calibrate(each, x)
    with torch.no_grad():
        assert equal(target(x), source(x))


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_tied_weights_stay_tied_and_are_copied_once_a_device(
    devices: Devices, weights: str
) -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("a", "b", "c")})
    model["c"].weight = model["a"].weight
    qv.convert(model, Float8CurrentScaling(), weights=weights)
    assert find_tied_parameters(model) == [["a.weight", "c.weight"]]
    places = {"a": devices[0], "b": devices[1], "c": devices[0]}
    dispatch_model(model, places)
    assert model["a"].weight is model["c"].weight
    assert model["a"].weight.device == devices[0]
    assert all(isinstance(each.weight, nn.Parameter) for each in model.values())
    x = torch.randn(4, 16, device=devices[0])
    with torch.no_grad():
        assert equal(model["a"](x), model["c"](x))
    if weights == "quantize":
        assert {part.device for part in parts(model["a"].weight).values()} == {devices[0]}


def test_quantized_weights_to_disk_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = converted(weights="quantize")
    with pytest.raises(NotImplementedError, match=r"offload .* to the CPU, not to disk"):
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))


@pytest.mark.usefixtures("fresh_accelerate")
def test_an_accelerator_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    model = converted()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizers[0] = accelerator.prepare(model, optimizers[0])
    for step in range(4):
        x = torch.randn(4, 16)
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizers[0].step()
            optimizers[0].zero_grad()
        other = twin(x).square().mean() / 2
        other.backward()
        if step % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert equal(loss, other * 2)
    assert_same(scaling(model), scaling(twin))
    accelerator.save_state(str(tmp_path))
    before = scaling(model)
    train_step(model, 9 * torch.randn(4, 16), torch.randn(4, 64), RECIPE)
    accelerator.load_state(str(tmp_path))
    assert_same(scaling(model), before)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_bfloat16_of_the_accelerator_goes_with_fp8(recipe: str) -> None:
    model = converted(named_recipe(recipe))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(model)
    with launches() as log:
        accelerator.backward(model(torch.randn(4, 16)).sum())
    assert [launch.kernel for launch in log].count("scaled_mm") == 2 * 3 - 1  # x needs no gradient
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_a_generated_sequence_is_the_same_split_or_whole(devices: Devices) -> None:
    whole = tiny_llama()
    qv.convert(whole, Float8CurrentScaling(), weights="quantize")
    split = copy.deepcopy(whole)
    first, second = devices
    places = {"model.embed_tokens": first, "model.layers.0": first, "model.layers.1": second}
    dispatch_model(
        split, places | {"model.norm": second, "model.rotary_emb": first, "lm_head": first}
    )
    ids = tokens().to(first)
    made = [
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        for model in (whole.to(first), split)
    ]
    assert equal(*made)
