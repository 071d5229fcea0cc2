"""MasterWeights: values, state, devices, and that it trains where plain steps round away."""

import copy
import io

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.optim import MasterWeights
from tests.samples import normal
from tests.tensors.formats import QUANTIZERS, make, same_parts

every = pytest.mark.parametrize("name", QUANTIZERS)


def linear(name: str, device="cpu") -> nn.Linear:
    module = nn.Linear(70, 30, device=device)
    module.weight = nn.Parameter(make(name, 30, 70, device=device))
    nn.init.zeros_(module.bias)
    return module


def give_gradients(module: nn.Module, step: int) -> None:
    for i, parameter in enumerate(module.parameters()):
        parameter.grad = normal(*parameter.shape, name=f"{step} {i}", device=parameter.device)


def run(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(module, step)
        optimizer.step()
        optimizer.zero_grad()


@every
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_masters_step_as_float32_parameters_do(name: str, inner) -> None:
    module = linear(name)
    plain = nn.Linear(70, 30)
    plain.load_state_dict({"weight": module.weight.dequantize(), "bias": module.bias})
    optimizer = MasterWeights(module.parameters(), inner, lr=1e-3)
    run(module, optimizer, range(3))
    run(plain, inner(plain.parameters(), lr=1e-3), range(3))
    assert torch.equal(optimizer.master(module.weight), plain.weight)
    assert torch.equal(module.bias, plain.bias)
    assert same_parts(module.weight, QUANTIZERS[name]()(plain.weight))
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(KeyError):
        optimizer.master(module.bias)


def test_a_preserved_value_is_the_first_master_if_it_still_holds() -> None:
    x = normal(30, 70, name="init").bfloat16()
    for changed in (False, True):
        weight = nn.Parameter(QUANTIZERS["mx"]()(x))
        weight._high_precision_init_val = x.clone()
        if changed:
            with torch.no_grad():
                weight.mul_(2)
        optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
        expected = weight.dequantize(torch.float32) if changed else x.float()
        assert torch.equal(optimizer.master(weight), expected)


def test_it_trains_where_plain_steps_round_away() -> None:
    target = normal(8, 16, name="target") * 0.5
    x = normal(64, 16, name="x")
    losses = {}
    for kind in ("plain", "masters"):
        weight = nn.Parameter(QUANTIZERS["float8"]()(normal(8, 16, name="start")))
        if kind == "plain":
            optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=0.05)
        else:
            optimizer = MasterWeights([weight], torch.optim.SGD, lr=0.05)
        for _ in range(800):
            loss = (x @ (weight - target).t()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = loss.item()
    rounding = (QUANTIZERS["float8"]()(target).dequantize() - target).pow(2).mean().item() * 16
    assert losses["masters"] < 3 * rounding
    assert losses["plain"] > 10 * losses["masters"]


def test_state_goes_through_a_file() -> None:
    module = linear("block_1d")
    optimizer = MasterWeights(module.parameters(), torch.optim.AdamW, lr=1e-3)
    run(module, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for order in (("model", "optimizer"), ("optimizer", "model")):
        twin = linear("block_1d")
        again = MasterWeights(twin.parameters(), torch.optim.AdamW, lr=9.0)
        loaders = {"model": twin.load_state_dict, "optimizer": again.load_state_dict}
        for part in order:
            loaders[part](copy.deepcopy(saved[part]))
        assert again.param_groups[0]["lr"] == 1e-3
        assert torch.equal(again.master(twin.weight), optimizer.master(module.weight))
        reference = copy.deepcopy(saved)
        run(twin, again, range(2, 4))
        first = linear("block_1d")
        first.load_state_dict(reference["model"])
        expected = MasterWeights(first.parameters(), torch.optim.AdamW, lr=1e-3)
        expected.load_state_dict(reference["optimizer"])
        run(first, expected, range(2, 4))
        assert same_parts(twin.weight, first.weight)
        assert torch.equal(again.master(twin.weight), expected.master(first.weight))
    run(module, optimizer, range(2, 4))
    assert torch.equal(again.master(twin.weight), optimizer.master(module.weight))


def test_a_state_without_masters_is_refused() -> None:
    module = linear("mx")
    optimizer = MasterWeights(module.parameters(), torch.optim.SGD, lr=1.0)
    state = optimizer.state_dict()
    del state["state"][0]["master"]
    with pytest.raises(
        qv.CheckpointError, match="must have a master for the quantized parameter 0"
    ):
        optimizer.load_state_dict(state)


def test_a_parameter_that_was_written_to_gives_its_master_anew() -> None:
    module = linear("mx")
    optimizer = MasterWeights(module.parameters(), torch.optim.SGD, lr=0.0)
    kept = optimizer.master(module.weight).add_(1e-6).clone()
    run(module, optimizer, range(1))
    assert torch.equal(optimizer.master(module.weight), kept)
    value = normal(30, 70, name="loaded")
    with torch.no_grad():
        module.weight.copy_(value)
    run(module, optimizer, range(1))
    assert torch.equal(optimizer.master(module.weight), module.weight.dequantize())
    assert torch.equal(module.weight.dequantize(), QUANTIZERS["mx"]()(value).dequantize())


def test_groups_schedules_and_closures() -> None:
    module = linear("mx")
    optimizer = MasterWeights([{"params": [module.weight], "lr": 1.0}], torch.optim.SGD, lr=0.5)
    optimizer.add_param_group({"params": [module.bias]})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    assert [group["momentum"] for group in optimizer.param_groups] == [0, 0]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = optimizer.master(module.weight).clone()
    for rate in (1.0, 0.5):
        give_gradients(module, 0)
        grad = module.weight.grad.clone()
        assert optimizer.step(lambda: 7) == 7
        schedule.step()
        before -= rate * grad
        torch.testing.assert_close(optimizer.master(module.weight), before)


def test_masters_live_with_their_parameters(devices) -> None:
    modules = nn.ModuleList([linear("mx", device) for device in devices])
    alone = linear("mx")
    optimizer = MasterWeights(modules.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        for module in (*modules, alone):
            give_gradients(module, step)
        optimizer.step()
    run(alone, MasterWeights(alone.parameters(), torch.optim.AdamW, lr=1e-2), range(2))
    for module, device in zip(modules, devices, strict=True):
        assert optimizer.master(module.weight).device == module.weight.device == device
        assert same_parts(module.weight, alone.weight)
    assert torch.accelerator.current_device_index() == 0
