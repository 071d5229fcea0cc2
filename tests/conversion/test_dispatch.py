"""accelerate: conversion before and after dispatch_model, over simulated devices and offloaded."""

import copy
import inspect
import re

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from torch import nn

from quaver.conversion import ConversionError, convert, convert_back, status
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import Mlp, calibrate, tiny_gpt2, tiny_llama, tokens

RECIPE = DelayedScaling(amax_history_len=16)


def halves(devices: list[torch.device]) -> dict[str, torch.device]:
    """A device map of the tiny Llama: its second block is on the second device."""
    first, second = devices
    return {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.layers.0": first,
        "model.layers.1": second,
        "model.norm": second,
        "lm_head": second,
    }


def placements(log: list) -> set[tuple[torch.device, torch.device]]:
    return {(launch.device, launch.current) for launch in log}


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_before_and_after_dispatch_give_the_unsplit_models_values(weights, devices):
    first, second = devices
    whole = tiny_llama().to(first)
    before, after = copy.deepcopy(whole), copy.deepcopy(whole)
    ids = tokens().to(first)
    convert(whole, RECIPE, weights=weights)
    convert(before, RECIPE, weights=weights)
    before = dispatch_model(before, halves(devices))
    after = dispatch_model(after, halves(devices))
    report = convert(after, RECIPE, weights=weights)
    assert {layer.device for layer in report.converted} == {first, second}
    logits = {}
    for name, model in (("whole", whole), ("before", before), ("after", after)):
        calibrate(model, ids)
        with torch.no_grad(), launches() as log:
            logits[name] = model(ids).logits
        assert sum(launch.kernel == "scaled_mm" for launch in log) == 14
        devices = [first] if name == "whole" else [first, second]
        assert placements(log) == {(device, device) for device in devices}
        layers = [layer.self_attn.q_proj for layer in model.model.layers]
        states = [layer.recipe_states["forward"].device for layer in layers]
        assert states == [layer.weight.device for layer in layers]
    assert torch.equal(logits["before"], logits["whole"])
    assert torch.equal(logits["after"], logits["whole"])


def test_training_a_dispatched_model_equals_the_unsplit_one(devices):
    first, second = devices
    whole = tiny_llama().to(first).train()
    split = copy.deepcopy(whole)
    split = dispatch_model(split, halves(devices), force_hooks=True)
    ids = tokens().to(first)
    for model in (whole, split):
        convert(model, RECIPE)
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
    for name in ("scale", "amax_history"):
        for direction in ("forward", "backward"):
            states = [
                getattr(model.model.layers[1].mlp.up_proj.recipe_states[direction], name)
                for model in (whole, split)
            ]
            assert states[1].device == second
            assert torch.equal(states[0], states[1].to(first))


def test_convert_back_after_dispatch_is_bitwise_the_dispatched_original(devices):
    model = tiny_llama()
    model = dispatch_model(model, halves(devices))
    ids = tokens()
    layer = model.model.layers[1].mlp.up_proj
    keys = {name: list(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(ids).logits
        convert(model, RECIPE)
        assert layer._old_forward.__func__ is type(layer).forward
        assert "is_first_microbatch" in inspect.signature(layer.forward).parameters
        convert_back(model)
        assert layer._old_forward.__func__ is nn.Linear.forward
        assert list(inspect.signature(layer.forward).parameters) == ["input"]
        assert torch.equal(model(ids).logits, expected)
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == keys


def test_removing_accelerates_hooks_leaves_the_layers_in_fp8(devices):
    model = tiny_llama()
    model = dispatch_model(model, halves(devices))
    convert(model, RECIPE)
    remove_hook_from_submodules(model)
    model.to("cpu")
    ids = tokens()
    calibrate(model, ids)
    with torch.no_grad(), launches() as log:
        model(ids)
    assert sum(launch.kernel == "scaled_mm" for launch in log) == 14
    assert placements(log) == {(torch.device("cpu"), torch.device("cpu"))}
    convert_back(model)
    assert type(model.model.layers[0].mlp.up_proj).forward is nn.Linear.forward
    with launches() as log:
        model(ids)
    assert log == []


class Shift(ModelHook):
    """Adds one to the output."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


def test_chained_hooks_stay():
    model = Mlp()
    for hook in (AlignDevicesHook("cpu"), Shift()):
        add_hook_to_module(model.fc1, hook, append=True)
    x = torch.randn(4, 16)
    shifted = model.fc1(x)
    convert(model, RECIPE)
    with launches() as log:
        out = model.fc1(x)
    assert log != []
    assert torch.allclose(out, shifted, atol=0.2)
    convert_back(model)
    assert torch.equal(model.fc1(x), shifted)


def test_gpt2_over_two_devices(devices):
    first, second = devices
    whole = tiny_gpt2().to(first)
    ids = tokens().to(first)
    convert(whole, RECIPE)
    calibrate(whole, ids)
    split = copy.deepcopy(whole)
    split = dispatch_model(
        split,
        {
            "transformer.wte": first,
            "transformer.wpe": first,
            "transformer.drop": first,
            "transformer.h.0": first,
            "transformer.h.1": second,
            "transformer.ln_f": second,
            "lm_head": first,
        },
    )
    with torch.no_grad(), launches() as log:
        assert torch.equal(split(ids).logits, whole(ids).logits)
    assert {(first, first), (second, second)} <= placements(log)


def test_keep_works_after_offloading_and_status_says_where_it_runs(devices):
    device = devices[1]
    model = Mlp()
    x = torch.randn(4, 16)
    expected = model(x)
    cpu_offload(model, execution_device=device)
    report = convert(model, RECIPE)
    assert report.converted[0].device == torch.device("meta")
    assert "its scale comes from its first use" in report.converted[0].note
    layer = status(model).layers[0]
    assert (layer.device, layer.offloaded) == (device, True)
    assert f"{device}, offloaded" in str(status(model))
    calibrate(model, x)
    with torch.no_grad(), launches() as log:
        out = model(x)
    assert placements(log) == {(device, device)}
    assert torch.allclose(out, expected, atol=0.2)
    assert model.fc1.weight.device.type == "meta"
    assert model.fc1.recipe_states["forward"].device == device
    convert_back(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_quantize_after_offloading_says_what_to_do_and_changes_nothing():
    model = Mlp()
    cpu_offload(model, execution_device=torch.device("cpu"))
    message = (
        "weights='quantize' needs the values of fc1.weight, but it is offloaded or not loaded yet "
        "(device meta); convert before dispatch_model, or use weights='keep'"
    )
    with pytest.raises(ConversionError, match=re.escape(message)):
        convert(model, RECIPE, weights="quantize")
    assert type(model.fc1) is nn.Linear
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_conversion_before_offloading(weights, devices):
    device = devices[1]
    model = Mlp()
    convert(model, RECIPE, weights=weights)
    x = torch.randn(4, 16)
    calibrate(model, x)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(device)(x.to(device)).cpu()
        cpu_offload(model, execution_device=device)
        with launches() as log:
            assert torch.equal(model(x), expected)
    assert placements(log) == {(device, device)}
    if weights == "quantize":
        with pytest.raises(ConversionError, match="remove_hook_from_submodules first"):
            convert_back(model)
        remove_hook_from_submodules(model)
    convert_back(model)
    assert type(model.fc1) is nn.Linear
