"""FusedAdam: torch's Adam and AdamW, fused where that exists, with masters."""

import copy
import io

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.optim import FusedAdam
from quaver.recipe import Float8CurrentScaling
from tests.samples import normal

Devices = list[torch.device]
OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def give_gradients(module: nn.Module, step: int) -> None:
    for i, parameter in enumerate(module.parameters()):
        grad = normal(*parameter.shape, name=f"{step} {i}", device=parameter.device)
        parameter.grad = grad.to(parameter.dtype)


def run(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        give_gradients(module, step)
        optimizer.step()
        optimizer.zero_grad()


def test_it_equals_torchs_fused_of_the_same_mode() -> None:
    start = nn.Linear(30, 20)
    weights = {}
    for mode, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        module, twin = copy.deepcopy(start), copy.deepcopy(start)
        run(module, FusedAdam(module.parameters(), **OPTIONS, adam_w_mode=mode))
        run(twin, kind(twin.parameters(), **OPTIONS, fused=True))
        assert torch.equal(module.weight, twin.weight)
        assert torch.equal(module.bias, twin.bias)
        weights[mode] = module.weight
    assert not torch.equal(weights[True], weights[False])


def test_defaults_are_those_of_transformer_engine() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.zeros(3))])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
    assert (group["weight_decay"], group["fused"]) == (0.0, True)


def test_low_precision_weights_step_through_masters(devices: Devices) -> None:
    module = nn.Linear(30, 20, device=devices[1])
    twin = copy.deepcopy(module)
    module.bfloat16()
    with torch.no_grad():
        for parameter, plain in zip(module.parameters(), twin.parameters(), strict=True):
            plain.copy_(parameter)
    optimizer = FusedAdam(module.parameters(), **OPTIONS, master_weights=True)
    steps = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    for step in range(3):
        give_gradients(module, step)
        for parameter, plain in zip(module.parameters(), twin.parameters(), strict=True):
            plain.grad = parameter.grad.float()
        optimizer.step()
        steps.step()
    master = optimizer.master(module.weight)
    assert (master.dtype, master.device) == (torch.float32, devices[1])
    assert torch.equal(master, twin.weight)
    assert torch.equal(module.weight, twin.weight.bfloat16())
    assert torch.equal(module.bias, twin.bias.bfloat16())
    without = FusedAdam(module.parameters(), **OPTIONS)
    with pytest.raises(KeyError):
        without.master(module.weight)


def test_quantized_weights_have_masters_unasked(devices: Devices) -> None:
    with qv.quantized_model_init(recipe=Float8CurrentScaling()):
        module = qv.Linear(32, 16, device=devices[0])
    assert isinstance(module.weight, qv.Float8Tensor)
    twin = nn.Linear(32, 16, device=devices[0])
    with torch.no_grad():
        twin.weight.copy_(module.weight.dequantize())
        twin.bias.copy_(module.bias)
    optimizer = FusedAdam(module.parameters(), **OPTIONS)
    run(module, optimizer)
    run(twin, torch.optim.AdamW(twin.parameters(), **OPTIONS))
    assert torch.equal(optimizer.master(module.weight), twin.weight)
    assert isinstance(module.weight, qv.Float8Tensor)


def test_devices_and_groups_do_not_mix(devices: Devices) -> None:
    model = nn.ModuleList(nn.Linear(6, 6, device=device) for device in ("cpu", *devices))
    twins = copy.deepcopy(model)
    optimizer = FusedAdam([{"params": model[0].parameters()}], **OPTIONS, master_weights=True)
    optimizer.add_param_group(
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 1.0}
    )
    assert [g["lr"] for g in optimizer.param_groups] == [3e-3, 1.0]
    assert optimizer.param_groups[0]["fused"]
    run(model, optimizer)
    for twin, lr in zip(twins, (3e-3, 1.0, 1.0), strict=True):
        twin.optimizer = torch.optim.AdamW(twin.parameters(), **{**OPTIONS, "lr": lr})
    for step in range(3):
        give_gradients(twins, step)
        for twin in twins:
            twin.optimizer.step()
    for module, twin in zip(model, twins, strict=True):
        torch.testing.assert_close(module.weight, twin.weight)
        assert module.weight.device == twin.weight.device


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    module = nn.Linear(8, 8).bfloat16()
    optimizer = FusedAdam(module.parameters(), **OPTIONS, master_weights=True)
    run(module, optimizer)
    buffer = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), buffer)
    again = nn.Linear(8, 8).bfloat16()
    resumed = FusedAdam(again.parameters(), master_weights=True)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    run(module, optimizer, range(3, 5))
    run(again, resumed, range(3, 5))
    assert torch.equal(again.weight, module.weight)
    assert torch.equal(resumed.master(again.weight), optimizer.master(module.weight))
