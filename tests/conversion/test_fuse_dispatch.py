"""fuse=True and accelerate: before and after dispatch_model over simulated devices; offloaded."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

from quaver.conversion import ConversionError, convert, convert_back, status
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import calibrate, tiny_gpt2, tiny_llama, tokens
from tests.conversion.test_dispatch import halves, placements

RECIPE = DelayedScaling(amax_history_len=16)


def gpt2_halves(devices: list[torch.device]) -> dict[str, torch.device]:
    first, second = devices
    return {
        "transformer.wte": first,
        "transformer.wpe": first,
        "transformer.drop": first,
        "transformer.h.0": first,
        "transformer.h.1": second,
        "transformer.ln_f": second,
        "lm_head": first,
    }


MODELS = [(tiny_llama, halves), (tiny_gpt2, gpt2_halves)]


@pytest.mark.parametrize("weights", ["keep", "quantize"])
@pytest.mark.parametrize(("make", "split"), MODELS, ids=["llama", "gpt2"])
def test_before_and_after_dispatch_give_the_unsplit_models_values(make, split, weights, devices):
    first, second = devices
    whole = make().to(first)
    before, after = copy.deepcopy(whole), copy.deepcopy(whole)
    ids = tokens().to(first)
    convert(whole, RECIPE, weights=weights, fuse=True)
    convert(before, RECIPE, weights=weights, fuse=True)
    before = dispatch_model(before, split(devices))
    after = dispatch_model(after, split(devices))
    report = convert(after, RECIPE, weights=weights, fuse=True)
    assert [module.device for module in report.fused] == [first, first, second, second]
    assert report.unfused == ()
    logits = {}
    for name, model in (("whole", whole), ("before", before), ("after", after)):
        calibrate(model, ids)
        with torch.no_grad(), launches() as log:
            logits[name] = model(ids).logits
        assert sum(launch.kernel == "scaled_mm" for launch in log) == 8
        here = [first] if name == "whole" else [first, second]
        assert placements(log) == {(device, device) for device in here}
        assert all(layer.scales_device == layer.device for layer in status(model).layers)
    assert torch.equal(logits["before"], logits["whole"])
    assert torch.equal(logits["after"], logits["whole"])


@pytest.mark.parametrize("convert_first", [True, False])
def test_training_a_dispatched_model_equals_the_unsplit_one(convert_first, devices):
    first, second = devices
    whole = tiny_llama().to(first).train()
    split = copy.deepcopy(whole)
    ids = tokens().to(first)
    convert(whole, RECIPE, fuse=True)
    if convert_first:
        convert(split, RECIPE, fuse=True)
    split = dispatch_model(split, halves(devices), force_hooks=True)
    if not convert_first:
        convert(split, RECIPE, fuse=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, split)]
    for _ in range(3):
        losses = []
        for model, optimizer in zip((whole, split), optimizers, strict=True):
            with launches() as log:
                loss = model(ids, labels=ids).loss
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert placements(log) == {(first, first), (second, second)}
    for name, parameter in whole.named_parameters():
        other = split.get_parameter(name)
        assert torch.equal(parameter.to("cpu"), other.to("cpu")), name
    for direction in ("forward", "backward"):
        states = [m.model.layers[1].mlp.recipe_states[direction] for m in (whole, split)]
        assert states[1].device == second
        assert torch.equal(states[0].scale, states[1].scale.to(first))


@pytest.mark.parametrize(("make", "split"), MODELS, ids=["llama", "gpt2"])
def test_convert_back_after_dispatch_is_bitwise_the_dispatched_original(make, split, devices):
    model = dispatch_model(make(), split(devices))
    ids = tokens()
    parameters = dict(model.named_parameters())
    keys = {name: list(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(ids).logits
        convert(model, RECIPE, fuse=True)
        convert_back(model)
        with launches() as log:
            assert torch.equal(model(ids).logits, expected)
    assert log == []
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == keys
    assert all(model.get_parameter(name) is p for name, p in parameters.items())


def test_hooks_that_are_removed_meanwhile_stay_removed_and_the_way_back_leads_to_another_device(
    devices,
):
    model = tiny_llama()
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    model = dispatch_model(model, halves(devices))
    convert(model, RECIPE, fuse=True)
    remove_hook_from_submodules(model)
    model.to("cpu")
    calibrate(model, ids)
    with torch.no_grad(), launches() as log:
        model(ids)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 8
    assert placements(log) == {(torch.device("cpu"), torch.device("cpu"))}
    convert_back(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert not any("_hf_hook" in module.__dict__ for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_a_model_that_was_dispatched_while_fused_runs_after_the_way_back(devices):
    model = tiny_llama()
    ids = tokens()
    with torch.no_grad():
        expected = model.to(devices[0])(ids.to(devices[0])).logits
        convert(model, RECIPE, fuse=True)
        model = dispatch_model(model, halves(devices))
        convert_back(model)
        assert torch.equal(model(ids).logits.to(devices[0]), expected)
    assert model.model.layers[1].self_attn.q_proj.weight.device == devices[1]


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_fused_model_can_be_offloaded(weights, devices):
    device = devices[1]
    model = tiny_llama(1)
    ids = tokens()
    convert(model, RECIPE, weights=weights, fuse=True)
    calibrate(model, ids)
    with torch.no_grad():
        expected = model(ids).logits
        cpu_offload(model, execution_device=device)
        with launches() as log:
            found = model(ids).logits
    assert torch.allclose(found.cpu(), expected, atol=1e-6)
    assert placements(log) == {(device, device)}
    with pytest.raises(ConversionError, match=r"weight, but they are offloaded \(device meta\)"):
        convert_back(model)
    remove_hook_from_submodules(model)
    convert_back(model)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)


def test_offloaded_blocks_and_blocks_over_two_devices_are_not_fused(devices):
    model = tiny_llama(1)
    cpu_offload(model, execution_device=devices[1])
    report = convert(model, RECIPE, fuse=True)
    assert report.fused == ()
    assert {norm.reason for norm in report.unfused} == {
        "parameters are offloaded or not loaded yet (device meta); convert before dispatch_model, "
        "and after loading"
    }
    model = tiny_llama(1).to(devices[0])
    model.model.layers[0].mlp.to(devices[1])
    report = convert(model, RECIPE, fuse=True)
    assert len(report.fused) == 1
    assert report.unfused[0].reason == f"parameters lie on {devices[0]}, {devices[1]}"
