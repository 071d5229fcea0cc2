"""Several devices in one process: everything runs, and stays, where the tensors are.

The current device is the first one throughout, unless a test moves it out of the way on purpose;
nothing moves it to help. Equal values alone would not do: one GPU may read another's memory.
"""

import gc
from itertools import product

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.devices import DeviceCache, current_device, scratch
from quaver.errors import DeviceMismatchError
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    gradients,
    linear_like,
    scaling,
    train_step,
)

RECIPE = DelayedScaling(amax_history_len=3)
PLACEMENTS = list(product((0, 1), (0, 1)))

Devices = list[torch.device]


def on_current(index: int) -> torch.accelerator.device_index:
    """An adversary: another device is current than the one that tensors live on."""
    return torch.accelerator.device_index(index)


# ---- one module


@pytest.mark.parametrize("quantized_weights", [False, True])
def test_module_on_a_non_current_device(devices: Devices, quantized_weights: bool) -> None:
    here, there = devices
    with qv.quantized_model_init(enabled=quantized_weights):
        layer = qv.Linear(32, 48, device=there)
    twin = qv.Linear(32, 48, device=here)
    with torch.no_grad():
        weight = layer.weight.dequantize() if quantized_weights else layer.weight
        twin.weight.copy_(weight)
        twin.bias.copy_(layer.bias)
    if quantized_weights:
        assert isinstance(layer.weight, qv.Float8Tensor)
        twin.quantize_weight()
        assert layer.weight.rowwise_data.device == there
        assert layer.weight.rowwise_scale_inv.device == there
        assert equal(twin.weight.payload().data, layer.weight.payload().data)
    x, grad = torch.randn(8, 32), torch.randn(8, 48)
    for _ in range(2):
        with launches() as log:
            results = train_step(layer, x.to(there), grad, RECIPE)
        assert_guarded(log, [there])
        assert_same(results, train_step(twin, x.to(here), grad, RECIPE))
        assert_state_devices(layer, there)
        assert_same(scaling(layer), scaling(twin))
    assert layer.weight.grad.device == there
    assert torch.isfinite(results["y"]).all()
    assert results["y"].abs().max() > 0
    assert current_device(here.type) == here


class WatchesTheDevice(qv.Linear):
    """Looks at the current device right after `prepare_forward`."""

    seen: list[torch.device]

    def prepare_forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().prepare_forward(x)
        self.seen.append(current_device(x.device.type))
        return x


@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_every_launch_has_its_operands_device_current(
    devices: Devices, tensor: int, current: int
) -> None:
    device = devices[tensor]
    layer = WatchesTheDevice(32, 32, device=device)
    layer.seen = []
    x = torch.randn(4, 32, device=device, requires_grad=True)
    with launches() as log, on_current(current):
        with qv.autocast(recipe=RECIPE):
            y = layer(x)
        assert current_device(device.type).index == current
        y.sum().backward()
        assert current_device(device.type).index == current
    assert layer.seen == [device]
    assert_guarded(log, [device])
    kernels = [launch.kernel for launch in log]
    assert kernels.count("scaled_mm") == 3
    assert [k for k in kernels if "cast" in k] == ["cast", "cast", "cast_grad"]
    assert kernels.count("scale_update") == 2
    assert x.grad is not None
    assert x.grad.device == y.device == device
    assert_state_devices(layer, device)


@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_a_backward_called_by_hand_under_another_device(
    devices: Devices, tensor: int, current: int
) -> None:
    """A hook, or a schedule of one's own, may call a backward node under any current device."""
    device = devices[tensor]
    layer = qv.Linear(32, 32, device=device)
    with qv.autocast(recipe=RECIPE):
        y = layer(torch.randn(4, 32, device=device, requires_grad=True))
    node = y.grad_fn
    while not hasattr(node, "plan"):
        node = node.next_functions[0][0]
    with launches() as log, torch.no_grad(), on_current(current):
        dx, dw, db = node.apply(torch.ones(4, 32, device=device))[:3]
        assert current_device(device.type).index == current
    assert_guarded(log, [device], least=3)
    assert dx.device == dw.device == db.device == device


class FailsToPrepare(qv.Linear):
    def _prepare_states(self, recipe: object, device: torch.device) -> None:
        assert current_device(device.type) == device
        raise RuntimeError("preparation failed")


class FailsInForward(qv.Linear):
    def forward_quantized(self, x: torch.Tensor, *args: object) -> torch.Tensor:
        assert current_device(x.device.type) == x.device
        raise RuntimeError("the forward failed")


@pytest.mark.parametrize("kind", [FailsToPrepare, FailsInForward])
@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_the_current_device_is_restored_when_it_raises(
    devices: Devices, tensor: int, current: int, kind: type[qv.Linear]
) -> None:
    layer = kind(16, 16, device=devices[tensor])
    x = torch.randn(2, 16, device=devices[tensor])
    with on_current(current):
        with pytest.raises(RuntimeError, match="failed"), qv.autocast(recipe=RECIPE):
            layer(x)
        assert current_device(x.device.type).index == current
    layer.__class__ = qv.Linear  # and the next forward finds nothing left over
    with qv.autocast(recipe=RECIPE):
        assert layer(x).device == devices[tensor]


def test_operands_on_two_devices_are_named_before_anything_runs(devices: Devices) -> None:
    here, there = devices
    layer = qv.Linear(16, 16, device=there)
    x = torch.randn(2, 16, device=here)
    with launches() as log, qv.autocast(recipe=RECIPE):
        with pytest.raises(DeviceMismatchError, match=f"x is on {here} and weight is on {there}"):
            layer(x)
        layer.bias = nn.Parameter(torch.zeros(16, device=here))
        with pytest.raises(DeviceMismatchError, match=f"x is on {there} and bias is on {here}"):
            layer(x.to(there))
    assert log == []
    assert layer.recipe_states == {}
    assert current_device(here.type) == here


# ---- fusible operations


@pytest.mark.parametrize("current", [0, 1])
def test_basic_linear_on_a_non_current_device(devices: Devices, current: int) -> None:
    there = devices[1]
    layer = qv.ops.BasicLinear(32, 48, device=there)
    twin = linear_like(nn.Linear(32, 48, bias=False), devices[0])
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
    x, grad = torch.randn(4, 32), torch.randn(4, 48)
    with launches() as log, on_current(current):
        results = train_step(layer, x.to(there), grad, RECIPE)
    assert_guarded(log, [there])
    assert_state_devices(layer, there)
    assert_same(results, train_step(twin, x.to(devices[0]), grad, RECIPE))


class WatchingBias(qv.ops.Bias):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = current_device(x.device.type)
        return super().forward(x)


def test_sequential_on_a_non_current_device(devices: Devices) -> None:
    there = devices[1]
    ops = qv.ops
    model = ops.Sequential(
        ops.BasicLinear(32, 48, device=there),
        ops.Bias(48, device=there),
        nn.ReLU(),
        ops.Linear(48, 16, device=there),
        WatchingBias(16, device=there),
    )
    with torch.no_grad():
        model[1].bias.normal_()
        model[4].bias.normal_()
    plain = nn.Sequential(
        linear_like(nn.Linear(32, 48), devices[0]),
        nn.ReLU(),
        linear_like(nn.Linear(48, 16), devices[0]),
    )
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight)
        plain[0].bias.copy_(model[1].bias)
        plain[2].weight.copy_(model[3].weight)
        plain[2].bias.copy_(model[3].bias)
    x, grad = torch.randn(4, 32), torch.randn(4, 16)
    with launches() as log:
        results = train_step(model, x.to(there), grad, RECIPE)
    assert_guarded(log, [there], least=10)
    assert model[4].seen == there  # though the bias launches no kernel
    assert current_device(there.type) == devices[0]
    expected = train_step(plain, x.to(devices[0]), grad, RECIPE)
    assert equal(results["y"], expected["y"] + model[4].bias.cpu())
    assert equal(results["dx"], expected["dx"])
    assert equal(results["0.weight"], expected["0.weight"])
    assert equal(results["1.bias"], expected["0.bias"])
    for layer in (model[0], model[3]):
        assert_state_devices(layer, there)


def test_the_fuser_restores_the_current_device_when_an_operation_raises(devices: Devices) -> None:
    model = qv.ops.Sequential(qv.ops.Bias(8, device=devices[1]), qv.ops.Bias(9, device=devices[1]))
    with pytest.raises(qv.QuaverError, match="Bias adds to 9 features"):
        model(torch.zeros(2, 8, device=devices[1]))
    assert current_device(devices[0].type) == devices[0]


# ---- several modules


def test_two_modules_on_different_devices_in_one_autocast(devices: Devices) -> None:
    layers = [qv.Linear(32, 32, device=device) for device in devices]
    inputs = [torch.randn(4, 32, device=device, requires_grad=True) for device in devices]
    with launches() as log, qv.autocast(recipe=RECIPE):
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    (outputs[0].sum() + outputs[1].sum().to(devices[0])).backward()
    assert_guarded(log, devices, least=8)
    for layer, x, device in zip(layers, inputs, devices, strict=True):
        assert_state_devices(layer, device)
        forward, backward = (layer.recipe_states[mode] for mode in ("forward", "backward"))
        assert equal(forward.scale[0], torch.tensor(448.0) / x.abs().max().cpu())
        assert forward.amax_history[-1, 1] == layer.weight.abs().max()
        assert backward.scale[0].item() == 57344.0
        assert x.grad is not None
        assert x.grad.device == device


class Interleaved(nn.Module):
    """Three layers, each on a device of its own choice; activations move between them."""

    def __init__(self, places: Devices) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            qv.Linear(sizes[0], sizes[1], device=place)
            for sizes, place in zip(((32, 64), (64, 48), (48, 32)), places, strict=True)
        )
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            x = torch.tanh(layer(x.to(place)))
        return x


def interleaved_and_unsplit(devices: Devices) -> tuple[Interleaved, Interleaved]:
    split = Interleaved([devices[1], devices[0], devices[1]])
    whole = Interleaved([devices[0]] * 3)
    whole.load_state_dict(split.state_dict())
    return split, whole


def test_three_modules_interleaved_over_two_devices(devices: Devices) -> None:
    split, whole = interleaved_and_unsplit(devices)
    x, grad = torch.randn(4, 32), torch.randn(4, 32)
    with launches() as log:
        results = train_step(split, x, grad, RECIPE)
    assert_guarded(log, devices, least=3 * 6 + 4)
    updates = [launch.device for launch in log if launch.kernel == "scale_update"]
    assert updates == [devices[1], devices[0]] * 2  # one a device and direction
    assert_same(results, train_step(whole, x, grad, RECIPE))
    for layer, place in zip(split.layers, split.places, strict=True):
        assert_state_devices(layer, place)
    assert_same(scaling(split), scaling(whole))


@pytest.mark.parametrize("first_scale", ["amax", "one"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_split_model_equals_the_unsplit_bit_for_bit(
    devices: Devices, first_scale: str, algorithm: str
) -> None:
    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=algorithm, first_scale=first_scale
    )
    split, whole = interleaved_and_unsplit(devices)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (split, whole)]
    seen = []
    for step in range(4):
        x, grad = torch.randn(4, 32) * 2**step, torch.randn(4, 32)
        assert_same(train_step(split, x, grad, recipe), train_step(whole, x, grad, recipe))
        assert_same(scaling(split), scaling(whole))
        seen.append(scaling(split)["layers.0.forward.scale"])
        for optimizer in optimizers:
            optimizer.step()
    assert len({tuple(scale.tolist()) for scale in seen}) == 4  # the scales did move
    assert_same(dict(split.state_dict()), {k: v.cpu() for k, v in whole.state_dict().items()})


class Branches(nn.Module):
    """Two branches on two devices: autograd runs their backward passes side by side."""

    def __init__(self, places: Devices) -> None:
        super().__init__()
        self.places = places
        self.branches = nn.ModuleList(
            nn.Sequential(*(qv.Linear(32, 32, device=place) for _ in range(3))) for place in places
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home = self.places[0]
        outs = [b(x.to(p)).to(home) for b, p in zip(self.branches, self.places, strict=True)]
        return outs[0] + outs[1]


def test_backward_scales_wait_for_every_devices_part_of_the_pass(devices: Devices) -> None:
    split, whole = Branches(devices), Branches([devices[0]] * 2)
    whole.load_state_dict(split.state_dict())
    for _ in range(10):
        x, grad = torch.randn(4, 32), torch.randn(4, 32)
        with launches() as log:
            results = train_step(split, x.to(devices[0]), grad, RECIPE)
        kernels = [launch.kernel for launch in log]
        assert kernels[-2:] == ["scale_update"] * 2  # after all products of both devices
        assert kernels.count("scale_update") == 4
        assert_same(results, train_step(whole, x.to(devices[0]), grad, RECIPE))
        assert_same(scaling(split), scaling(whole))


# ---- without a module


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_standalone_quantize_and_dequantize(
    devices: Devices, tensor: int, current: int, dtype: torch.dtype
) -> None:
    device = devices[tensor]
    x = torch.randn(16, 32) * 3
    scale = torch.tensor([3.7])
    expected = qv.Float8Quantizer(scale, torch.zeros(1), dtype)(x)
    expected_values = expected.dequantize()
    amax = torch.zeros(1, device=device)
    quantizer = qv.Float8Quantizer(scale.to(device), amax, dtype)
    mine = x.to(device)
    with launches() as log, on_current(current):
        for _ in range(100):
            quantized = quantizer(mine)
            values = quantized.dequantize()
            assert quantized.device == values.device == device
            assert equal(quantized.rowwise_data, expected.rowwise_data)
            assert equal(quantized.columnwise_data, expected.columnwise_data)
            assert equal(quantized.rowwise_scale_inv, expected.rowwise_scale_inv)
            assert equal(values, expected_values)
        assert current_device(device.type).index == current
    assert_guarded(log, [device], least=200)
    assert amax.item() == x.abs().max().item()
    assert quantized.columnwise_data.shape == (32, 16)


def test_two_devices_never_share_scratch(devices: Devices) -> None:
    def request(device: torch.device) -> torch.Tensor:
        return scratch(device, "test", 64, torch.float32)

    first, second, third = request(devices[0]), request(devices[1]), request(devices[0])
    assert [t.device for t in (first, second, third)] == [devices[0], devices[1], devices[0]]
    assert third.data_ptr() == first.data_ptr()
    assert second.data_ptr() != first.data_ptr()
    with on_current(1):
        assert request(devices[0]).data_ptr() == first.data_ptr()
        assert request(devices[1]).data_ptr() == second.data_ptr()


def test_two_devices_never_share_a_cached_workspace(devices: Devices) -> None:
    made = []

    def make(device: torch.device, key: object) -> torch.Tensor:
        made.append((device, key))
        return torch.empty(8, device=device)

    cache = DeviceCache(make)
    first, second, third = (cache.get(devices[i], "workspace") for i in (0, 1, 0))
    assert third is first
    assert second is not first
    assert [first.device, second.device] == devices
    with on_current(1):
        assert cache.get(devices[0], "workspace") is first
        assert cache.get(devices[0], "other").device == devices[0]
    assert made == [(devices[0], "workspace"), (devices[1], "workspace"), (devices[0], "other")]
    for call in (cache.get, lambda d: scratch(d, "test", 1, torch.float32)):
        with pytest.raises(ValueError, match="with an index"):
            call(torch.device(devices[0].type))


def test_a_dead_model_takes_no_part(devices: Devices) -> None:
    models = [qv.Linear(32, 32, device=device) for device in devices]
    x = torch.randn(4, 32, requires_grad=True)
    with qv.autocast(recipe=RECIPE):
        ys = [model(x.to(device)).sum() for model, device in zip(models, devices, strict=True)]
    sum(y.to(devices[0]) for y in ys).backward()
    before = scaling(models[0])
    dead = models.pop(1)
    del dead, ys
    gc.collect()
    with launches() as log:
        train_step(models[0], x.to(devices[0]), torch.ones(4, 32), RECIPE)
    assert_guarded(log, [devices[0]])
    after = scaling(models[0])
    assert not equal(before[".forward.amax_history"], after[".forward.amax_history"])
    assert [launch.kernel for launch in log].count("scale_update") == 2


def test_two_live_models_do_not_finalize_each_other(devices: Devices) -> None:
    used, idle = (qv.Linear(32, 32, device=device) for device in devices)
    for model, device in ((used, devices[0]), (idle, devices[1])):
        train_step(model, torch.randn(4, 32, device=device), torch.ones(4, 32), RECIPE)
    before = scaling(idle)
    with launches() as log:
        train_step(used, torch.randn(4, 32, device=devices[0]), torch.ones(4, 32), RECIPE)
    assert_guarded(log, [devices[0]])
    assert_same(scaling(idle), before)
    assert gradients(used).keys() == {"weight", "bias"}
