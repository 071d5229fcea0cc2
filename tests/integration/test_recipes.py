"""Every recipe over devices: where it runs, and that a split model equals the unsplit one."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.devices import current_device
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
from tests.integration.recipes import BOUNDS, RECIPES, error
from tests.integration.test_multi_device import Branches, Interleaved

PLACEMENTS = list(product((0, 1), (0, 1)))
CASTS = {
    "delayed": {"cast": 2, "cast_grad": 1, "scale_update": 2},
    "current": {"current_cast": 3},
    "block": {"block_cast": 3},
    "mxfp8": {"mx_cast": 3},
    # input and gradient twice, since only their column-wise copies are transformed
    "nvfp4": {"nvfp4_cast": 5, "hadamard": 2, "next_number": 1},
    "custom": {"current_cast": 1, "mx_cast": 1, "block_cast": 1},
}
"""Kernels of one step of a linear, beside its three products."""

Devices = list[torch.device]

every_recipe = pytest.mark.parametrize("name", RECIPES)


@every_recipe
@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_every_launch_has_its_operands_device_current(
    devices: Devices, name: str, tensor: int, current: int
) -> None:
    device = devices[tensor]
    layer = qv.Linear(32, 48, device=device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    grad = torch.randn(8, 48, device=device)
    with launches() as log, torch.accelerator.device_index(current):
        with qv.autocast(recipe=RECIPES[name]):
            y = layer(x)
        y.backward(grad)
        assert current_device(device.type).index == current
    assert_guarded(log, [device])
    assert Counter(launch.kernel for launch in log) == {"scaled_mm": 3, **CASTS[name]}
    assert_state_devices(layer, device)
    exact = nn.functional.linear(x, layer.weight, layer.bias)
    assert 0 < error(y, exact) < BOUNDS[name]
    assert 0 < error(x.grad, grad @ layer.weight) < 2 * BOUNDS[name]
    assert 0 < error(layer.weight.grad, grad.t() @ x) < 2 * BOUNDS[name]
    assert x.grad.device == layer.weight.grad.device == layer.bias.grad.device == device


@every_recipe
@pytest.mark.parametrize(("tensor", "current"), PLACEMENTS)
def test_a_backward_called_by_hand_under_another_device(
    devices: Devices, name: str, tensor: int, current: int
) -> None:
    device = devices[tensor]
    layer = qv.Linear(32, 32, device=device)
    with qv.autocast(recipe=RECIPES[name]):
        y = layer(torch.randn(4, 32, device=device, requires_grad=True))
    node = y.grad_fn
    while not hasattr(node, "plan"):
        node = node.next_functions[0][0]
    with launches() as log, torch.no_grad(), torch.accelerator.device_index(current):
        gradients = node.apply(torch.randn(4, 32, device=device))[:3]
        assert current_device(device.type).index == current
    assert_guarded(log, [device], least=3)
    assert {gradient.device for gradient in gradients} == {device}


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(devices: Devices, name: str, dtype: torch.dtype) -> None:
    layer = qv.Linear(32, 48, device=devices[1], dtype=dtype)
    x, grad = torch.randn(8, 32, dtype=dtype, device=devices[1]), torch.randn(8, 48).to(dtype)
    results = train_step(layer, x, grad, RECIPES[name])
    assert {result.dtype for result in results.values()} == {dtype}
    exact = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    assert 0 < error(results["y"], exact) < BOUNDS[name] + 2**-8
    with torch.autocast(devices[1].type, dtype=dtype):
        full = qv.Linear(32, 48, device=devices[1])
        mine = train_step(full, x.float(), grad, RECIPES[name])
    assert mine["y"].dtype == dtype
    assert mine["dx"].dtype == mine["weight"].dtype == torch.float32


@every_recipe
@pytest.mark.parametrize("kind", [Interleaved, Branches])
def test_a_split_model_equals_the_unsplit_bit_for_bit(
    devices: Devices, name: str, kind: type[nn.Module]
) -> None:
    here, there = devices
    places = ([there, here, there], [here] * 3) if kind is Interleaved else (devices, [here] * 2)
    split, whole = (kind(where) for where in places)
    whole.load_state_dict(split.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (split, whole)]
    outputs = set()
    for step in range(4):
        x, grad = torch.randn(4, 32).to(here) * 2**step, torch.randn(4, 32)
        with launches() as log:
            results = train_step(split, x, grad, RECIPES[name])
        assert_guarded(log, devices)
        assert_same(results, train_step(whole, x, grad, RECIPES[name]))
        outputs.add(tuple(results["y"][0].tolist()))
        for optimizer in optimizers:
            optimizer.step()
    assert len(outputs) == 4
    assert scaling(split).keys() == scaling(whole).keys()
    for key, value in scaling(split).items():
        assert equal(value, scaling(whole)[key]), key
    assert_same(dict(split.state_dict()), {k: v.cpu() for k, v in whole.state_dict().items()})


@every_recipe
def test_the_cpu_equals_a_simulated_device(devices: Devices, name: str) -> None:
    if devices[0].type == "cuda":
        pytest.skip("a GPU sums in another order")
    layer = qv.Linear(30, 17, device=devices[1])
    twin = linear_like(layer, "cpu")
    for _ in range(3):
        x, grad = torch.randn(5, 30), torch.randn(5, 17)
        results = train_step(layer, x.to(devices[1]), grad, RECIPES[name])
        assert_same(results, train_step(twin, x, grad, RECIPES[name]))


@every_recipe
def test_sequential_equals_linear(devices: Devices, name: str) -> None:
    there = devices[1]
    ops = qv.ops
    model = ops.Sequential(
        ops.BasicLinear(32, 48, device=there),
        ops.Bias(48, device=there),
        nn.ReLU(),
        ops.Linear(48, 16, device=there),
        ops.BasicLinear(16, 16, device=there),
    )
    nn.init.normal_(model[1].bias)
    plain = nn.Sequential(
        linear_like(nn.Linear(32, 48), devices[0]),
        nn.ReLU(),
        linear_like(nn.Linear(48, 16), devices[0]),
        linear_like(nn.Linear(16, 16, bias=False), devices[0]),
    )
    pairs = ((0, 0), (3, 2), (4, 3))
    with torch.no_grad():
        for theirs, mine in pairs:
            plain[mine].weight.copy_(model[theirs].weight)
            # names choose a custom recipe's formats, and number the random bits
            plain[mine].qualified_name = model[theirs].qualified_name = f"layer{mine}"
        plain[0].bias.copy_(model[1].bias)
        plain[2].bias.copy_(model[3].bias)
    for _ in range(2):
        x, grad = torch.randn(4, 32), torch.randn(4, 16)
        with launches() as log:
            results = train_step(model, x.to(there), grad, RECIPES[name])
        assert_guarded(log, [there], least=15)
        expected = train_step(plain, x.to(devices[0]), grad, RECIPES[name])
        assert equal(results["y"], expected["y"])
        assert equal(results["dx"], expected["dx"])
        for theirs, mine in pairs:
            assert equal(results[f"{theirs}.weight"], expected[f"{mine}.weight"])
            assert_state_devices(model[theirs], there)
        assert equal(results["1.bias"], expected["0.bias"])


@every_recipe
def test_inference_equals_the_forward_of_training(devices: Devices, name: str) -> None:
    layer = qv.Linear(32, 48, device=devices[1])
    x = torch.randn(8, 32, device=devices[1])
    train_step(layer, x, torch.randn(8, 48), RECIPES[name])
    with qv.autocast(recipe=RECIPES[name]):
        trained = layer(x)
        with torch.no_grad():
            assert equal(layer(x), trained)
        with torch.inference_mode():
            assert equal(layer(x), trained)


@every_recipe
def test_a_kept_weight_equals_a_fresh_one(devices: Devices, name: str) -> None:
    layer = qv.Linear(32, 48, device=devices[1])
    train_step(layer, torch.randn(8, 32, device=devices[1]), torch.randn(8, 48), RECIPES[name])
    inputs = [torch.randn(8, 32, device=devices[1]) for _ in range(3)]
    with qv.autocast(recipe=RECIPES[name]):
        layer(inputs[0], is_first_microbatch=True)
        with torch.no_grad():
            kept = [layer(x, is_first_microbatch=False) for x in inputs]
            fresh = [layer(x) for x in inputs]
            layer.weight.zero_()
            assert equal(layer(inputs[1], is_first_microbatch=False), kept[1])
    assert all(equal(*pair) for pair in zip(kept, fresh, strict=True))
