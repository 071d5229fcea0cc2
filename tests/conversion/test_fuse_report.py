"""fuse=True: what the report says of norms that are not fused, and that they are then left."""

import functools
import re
from collections.abc import Callable

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from quaver.conversion import ConversionReport, Rule, convert, convert_back
from quaver.nn import LayerNormLinear, LayerNormMLP, Linear
from quaver.recipe import DelayedScaling, MXFP8BlockScaling
from tests.conversion.models import VOCABULARY, tiny_gpt2, tiny_llama, tokens

RECIPE = DelayedScaling(amax_history_len=16)
ATTENTION, MLP = "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"


def nothing(*args: object) -> None:
    """A hook that changes nothing."""


class Doubled(nn.Module):
    """No norm, but called one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * self.weight


class DoubledNorm(Doubled):
    """The same."""


def block_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0]


def hook_on_q(model: nn.Module) -> None:
    block_of(model).self_attn.q_proj.register_forward_hook(nothing)


def hook_on_attention(model: nn.Module) -> None:
    block_of(model).self_attn.register_forward_pre_hook(nothing)


def hook_of_accelerate(model: nn.Module) -> None:
    add_hook_to_module(block_of(model).mlp.up_proj, ModelHook())


def frozen_k(model: nn.Module) -> None:
    block_of(model).self_attn.k_proj.weight.requires_grad_(False)


def tied(model: nn.Module) -> None:
    block_of(model).mlp.up_proj.weight = block_of(model).mlp.gate_proj.weight


def no_norm(model: nn.Module) -> None:
    block_of(model).input_layernorm = DoubledNorm()


def own_forward(model: nn.Module) -> None:
    attention = block_of(model).self_attn
    attention.forward = functools.partial(type(attention).forward, attention)


def narrow(model: nn.Module) -> None:
    block_of(model).mlp.gate_proj.to(torch.bfloat16)


def biased_v(model: nn.Module) -> None:
    block_of(model).self_attn.v_proj.bias = nn.Parameter(torch.zeros(16))


@pytest.mark.parametrize(
    ("spoil", "norm", "reason"),
    [
        (hook_on_q, ATTENTION, "self_attn.q_proj has a hook, which would see or change other"),
        (hook_on_attention, ATTENTION, "self_attn has a hook, which would see its input"),
        (hook_of_accelerate, MLP, "mlp.up_proj has accelerate's hook ModelHook"),
        (frozen_k, ATTENTION, "differ in their requires_grad"),
        (tied, MLP, "gate_proj.weight is tied to model.layers.0.mlp.up_proj.weight"),
        (no_norm, ATTENTION, "DoubledNorm gives the values of neither a layer norm nor an RMS"),
        (own_forward, ATTENTION, "forward of model.layers.0.self_attn is replaced"),
        (narrow, MLP, "mlp.gate_proj, model.layers.0.mlp.up_proj differ in their dtype"),
        (biased_v, ATTENTION, "some of the layers to be joined have a bias, and some have none"),
    ],
)
def test_what_stands_in_the_way_is_said_and_the_layers_are_converted_one_by_one(
    spoil: Callable[[nn.Module], None], norm: str, reason: str
):
    model = tiny_llama(1)
    spoil(model)
    report = convert(model, fuse=True)
    assert [each.name for each in report.unfused] == [norm]
    assert reason in report.unfused[0].reason
    assert report.unfused[0].class_name == "transformers LlamaDecoderLayer"
    assert len(report.fused) == 1
    block = block_of(model)
    if norm == ATTENTION:
        assert type(block.self_attn.q_proj) is Linear
        assert type(block.mlp) is LayerNormMLP
        assert {layer.name.split(".")[-2] for layer in report.converted} == {"self_attn"}
        assert len(report.converted) == 4
    else:
        assert type(block.mlp.up_proj) is Linear
        assert type(block.input_layernorm) is LayerNormLinear
        assert len(report.converted) == 4
    assert re.search(r"Norms not fused\n.*\n.*norm .*block .*why", str(report))
    convert_back(model)
    assert type(block.mlp).__name__ == "LlamaMLP"


def reasons(report: ConversionReport) -> dict[str, str]:
    return {norm.name.rpartition(".")[2]: norm.reason for norm in report.unfused}


def test_rules_that_part_the_layers_of_a_fusion_keep_it_from_happening():
    model = tiny_llama(1)
    rules = [Rule("*k_proj", recipe=MXFP8BlockScaling()), Rule("*up_proj", skip=True)]
    report = convert(model, RECIPE, rules=rules, fuse=True)
    assert report.fused == ()
    assert reasons(report) == {
        "input_layernorm": "model.layers.0.self_attn.q_proj and model.layers.0.self_attn.k_proj "
        "are given different recipes",
        "post_attention_layernorm": "model.layers.0.mlp.up_proj is left as it is: skipped by "
        "rules[1], '*up_proj'",
    }
    assert block_of(model).self_attn.k_proj.recipe == MXFP8BlockScaling()


def test_a_rule_for_all_layers_of_a_fusion_gives_it_its_recipe():
    model = tiny_llama(2)
    rule = Rule("model.layers.1.*", recipe=MXFP8BlockScaling())
    report = convert(model, RECIPE, rules=[rule], fuse=True)
    assert [module.recipe for module in report.fused] == [RECIPE] * 2 + [MXFP8BlockScaling()] * 2
    assert [block.mlp.recipe for block in model.model.layers] == [RECIPE, MXFP8BlockScaling()]


def test_layers_that_are_quavers_already_are_not_fused():
    model = tiny_gpt2(1)
    convert(model)
    report = convert(model, fuse=True)
    assert report.fused == ()
    assert reasons(report) == {
        "ln_1": "transformer.h.0.attn.c_attn is Quaver's already; convert_back first",
        "ln_2": "transformer.h.0.mlp.c_fc is Quaver's already; convert_back first",
    }


@pytest.mark.filterwarnings("ignore")
def test_cross_attention_and_erf_gelu_of_gpt2():
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=32,
        add_cross_attention=True,
        activation_function="gelu",
    )
    model = GPT2LMHeadModel(config).eval()
    ids, other = tokens(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(ids, encoder_hidden_states=other).logits
        report = convert(model, fuse=True)
        found = model(ids, encoder_hidden_states=other).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert list(reasons(report)) == ["ln_cross_attn"]
    assert "calls it under a condition" in reasons(report)["ln_cross_attn"]
    projected, mlp = report.fused
    assert projected.replaces == ("transformer.h.0.ln_1", "transformer.h.0.attn.c_attn")
    assert mlp.class_name == "quaver LayerNormLinear"
    assert mlp.replaces == ("transformer.h.0.ln_2", "transformer.h.0.mlp.c_fc")
    assert mlp.note.startswith("not the whole MLP: the activation GELUActivation gives the values")
    assert "ln_1, attn.c_attn" in str(report)


def test_an_mlp_that_is_not_fused_as_a_whole_may_be_fused_in_part():
    model = tiny_llama(1)
    mlp = block_of(model).mlp
    mlp.act_fn = nn.GELU()
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        report = convert(model, rules=[Rule("*down*", skip=True)], fuse=True)
        found = model(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert [module.name for module in report.fused] == [ATTENTION, MLP]
    assert report.fused[1].note == (
        "not the whole MLP: model.layers.0.mlp.down_proj is left as it is: skipped by rules[0], "
        "'*down*'"
    )
    assert type(mlp.down_proj) is nn.Linear
    assert block_of(model).post_attention_layernorm.weight.shape == (128, 32)


def test_a_model_without_such_blocks_says_that_nothing_was_fused():
    report = convert(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), fuse=True)
    assert report.fused == report.unfused == ()
    assert "Nothing was fused" in str(report)
    assert "Nothing was fused" not in str(convert(nn.Sequential(nn.Linear(16, 16))))
