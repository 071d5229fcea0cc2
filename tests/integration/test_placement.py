"""Scaling states and quantized weights live with their module, wherever it goes."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.devices import current_device
from quaver.errors import DeviceMismatchError
from quaver.nn import QuantizedModule
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    scaling,
    train_step,
)

RECIPE = DelayedScaling(amax_history_len=3)

Devices = list[torch.device]


class Quantizing(QuantizedModule):
    """A module with neither parameters nor buffers: its input decides where its state lives."""

    def __init__(self) -> None:
        super().__init__()
        self._init_quantized()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            payload = self.recipe_states["forward"].quantize(x, 0, record=bool(call.record))
            return payload.data.to(x.dtype) * payload.scale_inv
        finally:
            self.end_forward()


def trained(device: torch.device) -> qv.Linear:
    layer = qv.Linear(16, 16, device=device)
    train_step(layer, torch.randn(4, 16, device=device), torch.randn(4, 16), RECIPE)
    return layer


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_state_is_made_on_the_device_that_is_named(devices: Devices, mode: str) -> None:
    state = qv.RecipeState.create(RECIPE, mode=mode, num_quantizers=2, device=devices[1])
    tensors = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 3
    assert {tensor.device for tensor in tensors} == {devices[1]}
    assert current_device(devices[0].type) == devices[0]
    assert state.scale.tolist() == [1, 1]
    assert state.amax_history.tolist() == [[0, 0]] * 3


def test_states_are_on_the_modules_device_before_any_forward(devices: Devices) -> None:
    made = qv.Linear(16, 16, device=devices[1], recipe=RECIPE)
    assert_state_devices(made, devices[1])
    converted = nn.Sequential(nn.Linear(16, 16, device=devices[1]))
    qv.convert(converted, RECIPE)
    assert_state_devices(converted[0], devices[1])
    weight_amax = converted[0].weight.detach().abs().max().cpu()
    scale = converted[0].recipe_states["forward"].scale[1]
    assert equal(scale, torch.tensor(448.0) / weight_amax)


@pytest.mark.parametrize("preserve", [False, True])
def test_quantized_weights_are_made_on_their_own_device(devices: Devices, preserve: bool) -> None:
    with (
        launches() as log,
        qv.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=preserve),
    ):
        layer = qv.Linear(16, 16, device=devices[1])
        basic = qv.ops.BasicLinear(16, 16, device=devices[1])
    assert_guarded(log, [devices[1]], least=2)
    for module in (layer, basic):
        weight = module.weight
        assert isinstance(weight, qv.Float8Tensor)
        assert weight.device == weight.rowwise_data.device == devices[1]
        assert weight.rowwise_scale_inv.device == devices[1]
        initial = weight.get_high_precision_init_val()
        assert (initial is not None) == preserve
        if initial is not None:
            assert initial.device == torch.device("cpu")
            step = initial.abs().max() * 2**-4
            assert (weight.dequantize().cpu() - initial).abs().max() < step
    assert current_device(devices[0].type) == devices[0]


def test_the_device_context_is_honoured(devices: Devices) -> None:
    with devices[1]:
        layer = qv.Linear(16, 16)
    assert layer.weight.device == devices[1]
    train_step(layer, torch.randn(4, 16, device=devices[1]), torch.randn(4, 16), RECIPE)
    assert_state_devices(layer, devices[1])


def test_module_device(devices: Devices) -> None:
    assert qv.get_module_device(qv.Linear(4, 4, device=devices[1])) == devices[1]
    assert qv.get_module_device(Quantizing()) is None
    buffered = Quantizing()
    buffered.register_buffer("table", torch.zeros(2, device=devices[1]))
    assert qv.get_module_device(buffered) == devices[1]
    split = nn.Sequential(*(nn.Linear(4, 4, device=device) for device in devices))
    with pytest.raises(DeviceMismatchError, match=f"{devices[0]}.*{devices[1]}"):
        qv.get_module_device(split)


@pytest.mark.parametrize("target", [0, "cpu"])
@pytest.mark.parametrize("quantized_weights", [False, True])
def test_states_follow_a_move(devices: Devices, target: int | str, quantized_weights: bool) -> None:
    device = torch.device(target) if isinstance(target, str) else devices[target]
    layer = trained(devices[1])
    if quantized_weights:
        layer.quantize_weight()
    stays = copy.deepcopy(layer)
    before = scaling(layer)
    layer.to(device)
    assert_state_devices(layer, device)
    assert_same(scaling(layer), before)
    if quantized_weights:
        assert layer.weight.rowwise_data.device == layer.weight.rowwise_scale_inv.device == device
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    with launches() as log:
        moved = train_step(layer, x.to(device), grad, RECIPE)
    assert_guarded(log, [device])
    if target == 0:
        assert_same(moved, train_step(stays, x.to(devices[1]), grad, RECIPE))
        assert_same(scaling(layer), scaling(stays))


def test_a_change_of_dtype_leaves_the_states_in_float32(devices: Devices) -> None:
    layer = trained(devices[1])
    before = scaling(layer)
    layer.to(torch.bfloat16)
    assert_same(scaling(layer), before)
    x = torch.randn(4, 16, device=devices[1], dtype=torch.bfloat16)
    assert train_step(layer, x, torch.randn(4, 16).bfloat16(), RECIPE)["y"].dtype == torch.bfloat16
    assert layer.recipe_states["forward"].scale.dtype == torch.float32


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved_whole(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_whole])
@pytest.mark.parametrize("quantized_weights", [False, True])
def test_a_duplicate_stays_on_the_device_and_learns_by_itself(
    devices: Devices, duplicate: Callable[[nn.Module], nn.Module], quantized_weights: bool
) -> None:
    layer = trained(devices[1])
    if quantized_weights:
        layer.quantize_weight()
    before = scaling(layer)
    twin = duplicate(layer)
    assert_state_devices(twin, devices[1])
    assert_same(scaling(twin), before)
    x, grad = torch.randn(4, 16, device=devices[1]), torch.randn(4, 16)
    results = train_step(twin, x, grad, RECIPE)
    assert_same(scaling(layer), before)
    assert scaling(twin).keys() == before.keys()
    assert_same(results, train_step(layer, x, grad, RECIPE))
    assert_same(scaling(twin), scaling(layer))


@pytest.mark.parametrize("quantized_weights", [False, True])
def test_a_module_made_on_meta_finds_its_device(devices: Devices, quantized_weights: bool) -> None:
    source = trained(devices[0])
    with torch.device("meta"), qv.quantized_model_init(enabled=quantized_weights):
        layer = qv.Linear(16, 16, recipe=RECIPE)
    assert layer.weight.device.type == "meta"
    layer.to_empty(device=devices[1])
    layer.reset_parameters()
    assert isinstance(layer.weight, qv.Float8Tensor) == quantized_weights
    with torch.no_grad():
        layer.weight.copy_(source.weight.to(devices[1]))
        layer.bias.copy_(source.bias.to(devices[1]))
    twin = copy.deepcopy(layer).to(devices[0])
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    results = train_step(layer, x.to(devices[1]), grad, RECIPE)
    assert_state_devices(layer, devices[1])
    assert_same(results, train_step(twin, x.to(devices[0]), grad, RECIPE))
    assert results["y"].isfinite().all()


def test_a_state_on_meta_is_made_anew_after_to_empty(devices: Devices) -> None:
    layer = trained(devices[1]).to("meta")
    layer.to_empty(device=devices[0])
    layer.reset_parameters()
    x = torch.full((4, 16), 2.0, device=devices[0])
    train_step(layer, x, torch.ones(4, 16), RECIPE)
    assert_state_devices(layer, devices[0])
    state = layer.recipe_states["forward"]
    assert state.scale[0].item() == 448 / 2
    assert state.amax_history[:, 0].tolist() == [0, 0, 2]


def test_without_parameters_the_input_decides(devices: Devices) -> None:
    module = Quantizing()
    for device, value in ((devices[1], 4.0), (devices[0], 8.0)):
        with launches() as log, qv.autocast(recipe=RECIPE):
            y = module(torch.full((2, 8), value, device=device))
        assert_guarded(log, [device], least=2)
        assert y.device == device
        assert_state_devices(module, device)
    # the state went along with what it had learnt
    assert module.recipe_states["forward"].amax_history[:, 0].tolist() == [0, 4, 8]


def test_a_parameter_that_a_hook_moves_is_noticed(devices: Devices) -> None:
    """accelerate's hooks write into `_parameters` directly, so `_apply` never sees the move."""
    layer = trained(devices[1])
    before = scaling(layer)
    for name, parameter in list(layer._parameters.items()):
        layer._parameters[name] = nn.Parameter(parameter.detach().to(devices[0]))
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        y = layer(torch.randn(4, 16, device=devices[0]))
    assert y.device == devices[0]
    assert_state_devices(layer, devices[0])
    assert_same(scaling(layer), before)
