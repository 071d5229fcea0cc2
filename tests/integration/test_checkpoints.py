"""state_dict: scaling states as plain tensors, to another device and from other checkpoints."""

import io
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import quaver as qv
from quaver.errors import CheckpointError
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_same, assert_state_devices, equal, scaling, train_step
from tests.integration.test_placement import Quantizing

RECIPE = DelayedScaling(amax_history_len=3)
KEY = "_extra_state"

Devices = list[torch.device]


def trained(device: torch.device, recipe: DelayedScaling = RECIPE, steps: int = 2) -> qv.Linear:
    layer = qv.Linear(16, 16, device=device, recipe=recipe)
    for i in range(steps):
        x = torch.full((4, 16), 2.0**i, device=device)
        train_step(layer, x, torch.randn(4, 16), recipe)
    return layer


def through_a_file(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location="cpu")


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_is_loaded_onto_another_device(devices: Devices, assign: bool) -> None:
    source = trained(devices[1])
    checkpoint = through_a_file(source.state_dict())
    assert checkpoint[KEY].dtype == torch.uint8
    assert checkpoint[KEY].device == torch.device("cpu")
    target = qv.Linear(16, 16, device=devices[0], recipe=RECIPE)
    if assign:
        checkpoint = {k: v if k == KEY else v.to(devices[0]) for k, v in checkpoint.items()}
    target.load_state_dict(checkpoint, assign=assign)
    assert_state_devices(target, devices[0])
    assert_same(scaling(target), scaling(source))
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    with launches() as log:
        results = train_step(target, x.to(devices[0]), grad, RECIPE)
    assert {launch.device for launch in log} == {devices[0]}
    assert_same(results, train_step(source, x.to(devices[1]), grad, RECIPE))
    assert_same(scaling(target), scaling(source))


def test_loading_sets_states_before_any_use_on_a_non_current_device(devices: Devices) -> None:
    checkpoint = through_a_file(trained(devices[0]).state_dict())
    target = qv.Linear(16, 16, device=devices[1])
    assert target.recipe_states == {}
    target.load_state_dict(checkpoint)
    assert_state_devices(target, devices[1])
    assert target.recipe_states["forward"].scale[0].item() == 448 / 2


def test_a_module_without_parameters_restores_its_state(devices: Devices) -> None:
    source = Quantizing()
    with qv.autocast(recipe=RECIPE):
        source(torch.full((2, 8), 4.0, device=devices[0]))
    checkpoint = through_a_file(source.state_dict())
    assert list(checkpoint) == [KEY]
    target = Quantizing()
    target.load_state_dict(checkpoint)
    assert_same(scaling(target), scaling(source))
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        target(torch.full((2, 8), 1.0, device=devices[1]))
    assert_state_devices(target, devices[1])
    assert_same(scaling(target), scaling(source))


def test_extra_state_has_one_size_with_and_without_a_state(devices: Devices) -> None:
    fresh, used = qv.Linear(16, 16, device=devices[1]), trained(devices[1])
    with launches() as log:
        empty = fresh.get_extra_state()
    assert log == []
    assert empty.shape == used.get_extra_state().shape
    assert empty.device == torch.device("cpu")
    assert not empty.any()
    assert fresh.recipe_states == {}
    long = trained(devices[1], DelayedScaling(amax_history_len=2000))
    assert long.get_extra_state().numel() > empty.numel()


def test_a_missing_extra_state_is_no_error(devices: Devices) -> None:
    source = trained(devices[1])
    checkpoint = {k: v for k, v in source.state_dict().items() if k != KEY}
    target = nn.Sequential(trained(devices[1]))
    before = scaling(target)
    result = target.load_state_dict({f"0.{k}": v for k, v in checkpoint.items()}, strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(scaling(target), before)
    assert equal(target[0].weight, source.weight)


def test_a_linear_checkpoint_of_torch_loads_strictly(devices: Devices) -> None:
    source = nn.Linear(16, 16, device=devices[0])
    target = qv.Linear(16, 16, device=devices[1])
    target.load_state_dict(through_a_file(source.state_dict()), strict=True)
    assert equal(target.weight, source.weight)
    assert target.weight.device == devices[1]
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):  # what is missing still shows
        target.load_state_dict({"bias": torch.zeros(16)}, strict=True)


@pytest.mark.parametrize("length", [2, 5])
def test_another_history_length_keeps_the_newest(devices: Devices, length: int) -> None:
    source = trained(devices[0], DelayedScaling(amax_history_len=4), steps=3)
    recipe = DelayedScaling(amax_history_len=length)
    target = qv.Linear(16, 16, device=devices[1], recipe=recipe)
    target.load_state_dict(through_a_file(source.state_dict()))
    history = target.recipe_states["forward"].amax_history
    assert history.device == devices[1]
    assert history[:, 0].tolist() == {2: [0, 4], 5: [0, 0, 1, 2, 4]}[length]
    train_step(target, torch.full((4, 16), 1.0, device=devices[1]), torch.ones(4, 16), recipe)
    assert target.recipe_states["forward"].scale[0].item() == 448 / 4


def test_a_checkpoint_is_loaded_into_a_module_on_meta_by_assignment(devices: Devices) -> None:
    source = trained(devices[0])
    target = qv.Linear(16, 16, device="meta")
    checkpoint = through_a_file(source.state_dict())
    moved = {k: v if k == KEY else v.to(devices[1]) for k, v in checkpoint.items()}
    target.load_state_dict(moved, assign=True)
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    results = train_step(target, x.to(devices[1]), grad, RECIPE)
    assert_state_devices(target, devices[1])
    assert_same(results, train_step(source, x.to(devices[0]), grad, RECIPE))
    assert_same(scaling(target), scaling(source))


def test_safetensors_carries_the_extra_state(devices: Devices, tmp_path: Path) -> None:
    source = trained(devices[1])
    checkpoint = {k: v.cpu() for k, v in source.state_dict().items()}
    safetensors.torch.save_file(checkpoint, tmp_path / "model.safetensors")
    target = qv.Linear(16, 16, device=devices[0], recipe=RECIPE)
    target.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert_state_devices(target, devices[0])
    assert_same(scaling(target), scaling(source))


def test_quantized_weights_are_saved_and_loaded_as_they_are(devices: Devices) -> None:
    source = trained(devices[1])
    source.quantize_weight()
    target = qv.Linear(16, 16, device=devices[0], recipe=RECIPE)
    target.quantize_weight()
    target.load_state_dict(through_a_file(source.state_dict()))
    mine, theirs = target.weight.payload(), source.weight.payload()
    assert mine.data.device == mine.scale_inv.device == devices[0]
    assert equal(mine.data, theirs.data)
    assert equal(mine.scale_inv, theirs.scale_inv)


def corrupt_scale(packed: torch.Tensor) -> torch.Tensor:
    words = packed.clone().view(torch.int32)
    words[16] = 0x7FC00000  # the first scale: NaN
    return words.view(torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: packed[:-4], "must have .* bytes"),
        (lambda packed: packed.float(), "uint8"),
        (lambda packed: torch.ones(8, dtype=torch.uint8), "cut short"),
        (lambda packed: packed.roll(1), "not Quaver's version"),
        (corrupt_scale, "finite and positive"),
    ],
)
def test_a_wrong_extra_state_is_refused(devices: Devices, change, message: str) -> None:
    source = trained(devices[1])
    with pytest.raises(CheckpointError, match=message) as caught:
        source.set_extra_state(change(source.get_extra_state()))
    assert "\n" not in str(caught.value)
