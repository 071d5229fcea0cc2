"""torch.autocast, mixed dtypes and GradScaler, which accelerate and Lightning run FP8 under."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, equal, scaling

RECIPE = DelayedScaling(amax_history_len=3)

Devices = list[torch.device]
LOW = [torch.bfloat16, torch.float16]


def run(
    layer: nn.Module, x: torch.Tensor, amp: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    enabled = amp is not None
    with torch.autocast(x.device.type, dtype=amp, enabled=enabled), qv.autocast(recipe=RECIPE):
        y = layer(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("amp", LOW)
def test_under_torch_autocast(devices: Devices, amp: torch.dtype) -> None:
    layer = qv.Linear(16, 32, device=devices[1])
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 16, device=devices[1])
    for _ in range(2):
        with launches() as log:
            y, dx = run(layer, x, amp)
        assert_guarded(log, [devices[1]])
        assert y.dtype == amp
        assert dx.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
        # as an input that was rounded beforehand; the weight is quantized from its own float32
        expected, _ = run(twin, x.to(amp), None)
        assert equal(y, expected)
        assert_same(scaling(layer), scaling(twin))
    amax = layer.recipe_states["forward"].amax_history[-1]
    assert amax[0] == x.to(amp).abs().max().float()
    assert amax[1] == layer.weight.abs().max()


@pytest.mark.parametrize("amp", LOW)
def test_autocast_on_the_cpu_does_not_touch_other_devices(
    devices: Devices, amp: torch.dtype
) -> None:
    layer = qv.Linear(16, 32, device=devices[1])
    with torch.autocast("cpu", dtype=amp), qv.autocast(recipe=RECIPE):
        assert layer(torch.randn(4, 16, device=devices[1])).dtype == torch.float32


def test_high_precision_layers_take_part_in_torch_autocast(devices: Devices) -> None:
    layer = qv.Linear(16, 32, device=devices[1])
    x = torch.randn(4, 16, device=devices[1])
    with torch.autocast(devices[1].type, dtype=torch.bfloat16):
        y = layer(x)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert y.dtype == torch.bfloat16
    assert equal(y, expected)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_dtypes(devices: Devices, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    layer = qv.Linear(16, 32, device=devices[1], dtype=weight_dtype)
    x = torch.randn(4, 16, device=devices[1]).to(x_dtype)
    y, dx = run(layer, x, None)
    assert y.dtype == dx.dtype == x_dtype
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == weight_dtype
    amax = layer.recipe_states["forward"].amax_history[-1]
    assert amax[:2].tolist() == [x.abs().max().item(), layer.weight.abs().max().item()]
    twin = qv.Linear(16, 32, device=devices[1])  # float32 holds the same values
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
        twin.bias.copy_(layer.bias)
    expected, _ = run(twin, x.float(), None)
    if devices[0].type != "cuda":  # where a product's sum and rounding depend on its dtype
        assert equal(y, expected.to(x_dtype))
    else:
        step = torch.finfo(x_dtype).eps
        torch.testing.assert_close(y, expected.to(x_dtype), rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize("amp", LOW)
def test_a_grad_scaler_skips_an_inf_step_and_goes_on(devices: Devices, amp: torch.dtype) -> None:
    device = devices[1]
    model = nn.Sequential(qv.Linear(16, 32, device=device), qv.Linear(32, 8, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000)
    x = torch.randn(8, 16, device=device)
    losses, scales = [], []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=amp), qv.autocast(recipe=RECIPE):
            loss = model(x).float().square().mean()
        factor = torch.inf if step == 3 else 1.0
        before = copy.deepcopy(model.state_dict())
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        changed = not equal(before["0.weight"], model[0].weight)
        assert changed == (step != 3)
    assert scales[2] == 2.0**10
    assert scales[3] == scales[-1] == 2.0**9
    assert losses[-1] < losses[4] < losses[0]
    for layer in model:
        for state in layer.recipe_states.values():
            assert state.device == device
            assert state.scale.isfinite().all()
            assert state.updates == 8
    backward = model[1].recipe_states["backward"]
    assert backward.scale[0] > 1  # it learnt from the finite steps
