"""Models of transformers: Llama with nn.Linear, GPT-2 with Conv1D, and LoRA of peft."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import quaver as qv
from quaver.conversion import convert, convert_back
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import VOCABULARY, calibrate, tiny_gpt2, tiny_llama, tokens


def products(log: list) -> int:
    return sum(launch.kernel == "scaled_mm" for launch in log)


def test_llama_is_converted_but_for_lm_head_and_generates():
    model = tiny_llama()
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    report = convert(model, DelayedScaling())
    assert len(report.converted) == 2 * 7
    assert [layer.name for layer in report.skipped] == ["lm_head"]
    assert report.bypassed == ()
    assert report.unmatched_rules == ()
    calibrate(model, ids)
    with torch.no_grad(), launches() as log:
        logits = model(ids).logits
    assert products(log) == 14
    assert not torch.equal(logits, expected)
    assert torch.allclose(logits, expected, atol=0.05)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 11)
    convert_back(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_a_tied_lm_head_stays_tied_when_it_is_converted():
    model = tiny_llama(tied=True)
    names = list(model.state_dict())
    report = convert(model, DelayedScaling(), weights="quantize", exclude=())
    outcomes = {layer.name: layer for layer in report.converted}
    assert outcomes["lm_head"].weights == "kept"
    assert outcomes["lm_head"].note == "weight kept: tied to model.embed_tokens.weight"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(layer.weights == "quantized" for layer in report.converted) == 14
    assert [name for name in model.state_dict() if "_extra_state" not in name] == names


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_gpt2_is_converted_with_its_transposed_weights(weights):
    model = tiny_gpt2()
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    names = list(model.state_dict())
    layer = model.transformer.h[0].attn.c_attn
    weight, text = layer.weight, repr(layer)
    report = convert(model, DelayedScaling(), weights=weights)
    assert len(report.converted) == 2 * 4
    assert report.converted[0].class_before == "transformers Conv1D"
    assert report.converted[0].class_after == "quaver Conv1D"
    assert isinstance(layer, Conv1D)
    assert isinstance(layer, qv.nn.QuantizedLinear)
    assert layer.weight.shape == (32, 96)
    assert repr(layer) == text
    assert [name for name in model.state_dict() if "_extra_state" not in name] == names
    calibrate(model, ids)
    with torch.no_grad(), launches() as log:
        logits = model(ids).logits
    assert products(log) == 8
    assert torch.allclose(logits, expected, atol=0.05)
    convert_back(model)
    assert type(layer) is Conv1D
    with torch.no_grad():
        if weights == "keep":
            assert layer.weight is weight
            assert torch.equal(model(ids).logits, expected)
        else:
            assert torch.allclose(model(ids).logits, expected, atol=0.05)


def test_conv1d_equals_linear_of_the_transposed_weight_forward_and_backward():
    conv = Conv1D(24, 16)
    linear = nn.Linear(16, 24)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias.normal_())
    for layer in (conv, linear):
        convert(layer, DelayedScaling())
    x = torch.randn(2, 5, 16)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    with launches() as log:
        outs = [layer(each) for layer, each in zip((conv, linear), inputs, strict=True)]
        for out in outs:
            out.square().sum().backward()
    assert products(log) == 6
    assert torch.equal(*outs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(conv.weight.grad, linear.weight.grad.t())
    assert torch.equal(conv.bias.grad, linear.bias.grad)


def test_one_weight_used_both_ways_round_is_kept():
    conv, linear = Conv1D(16, 16), nn.Linear(16, 16)
    linear.weight = conv.weight
    report = convert(nn.ModuleList([conv, linear]), weights="quantize")
    assert [(layer.weights, layer.note) for layer in report.converted] == [
        ("kept", "weight kept: tied to 1.weight"),
        ("kept", "weight kept: tied to 0.weight"),
    ]
    assert linear.weight is conv.weight


def test_conv1d_without_a_recipe_is_bitwise_transformers_own():
    layer = Conv1D(24, 16)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    convert(layer)
    assert torch.equal(layer(x), expected)


def test_a_converted_gpt2_can_be_copied_and_pickled():
    model = tiny_gpt2(layers=1)
    convert(model, DelayedScaling())
    ids = tokens()
    calibrate(model, ids)
    with torch.no_grad():
        expected = model(ids).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            layer = twin.transformer.h[0].mlp.c_fc
            assert type(layer) is type(model.transformer.h[0].mlp.c_fc)
            assert layer.weight is not model.transformer.h[0].mlp.c_fc.weight
            assert torch.equal(twin(ids).logits, expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("convert_first", [True, False])
def test_lora_trains_on_converted_layers(devices, convert_first):
    device = devices[1]
    model = tiny_llama().to(device)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    if convert_first:
        convert(model, DelayedScaling())
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        report = convert(model, DelayedScaling(), exclude=("*lora_*", "*.lm_head"))
        assert len(report.converted) == 14
        assert report.unmatched_rules == ()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    ids = tokens(4).to(device)
    model.train()
    losses = []
    with launches() as log:
        for _ in range(12):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.1)
    assert losses[-1] < losses[0] - 0.25
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in base.items())
    assert products(log) >= 12 * 14
    assert {launch.device for launch in log} == {device}
    assert {launch.kernel for launch in log} >= {"cast", "scaled_mm", "scale_update"}
