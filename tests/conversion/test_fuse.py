"""fuse=True in high precision: what is fused, that values stay, and the way back."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import quaver as qv
from quaver.conversion import ConversionError, convert, convert_back
from quaver.nn.linear import QuantizedLinear
from quaver.recipe import DelayedScaling
from tests.conversion.models import VOCABULARY, tiny_gpt2, tiny_llama, tokens

LLAMA_BLOCK = {
    "input_layernorm.layer_norm_weight": (32,),
    "input_layernorm.weight": (32 + 16 + 16, 32),
    "input_layernorm._extra_state": None,
    "mlp.layer_norm_weight": (32,),
    "mlp.fc1_weight": (64 + 64, 32),
    "mlp.fc2_weight": (32, 64),
    "mlp._extra_state": None,
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.o_proj._extra_state": None,
}
GPT2_BLOCK = {
    "ln_1.layer_norm_weight": (32,),
    "ln_1.layer_norm_bias": (32,),
    "ln_1.weight": (96, 32),
    "ln_1.bias": (96,),
    "ln_1._extra_state": None,
    "mlp.layer_norm_weight": (32,),
    "mlp.layer_norm_bias": (32,),
    "mlp.fc1_weight": (128, 32),
    "mlp.fc1_bias": (128,),
    "mlp.fc2_weight": (32, 128),
    "mlp.fc2_bias": (32,),
    "mlp._extra_state": None,
    "attn.c_proj.weight": (32, 32),
    "attn.c_proj.bias": (32,),
    "attn.c_proj._extra_state": None,
}


def scattered(model: nn.Module) -> nn.Module:
    """Give norms and biases values that tell them apart from each other and from none."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def qwen3() -> nn.Module:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        attention_bias=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("make", "path", "expected"),
    [(tiny_llama, "model.layers.1", LLAMA_BLOCK), (tiny_gpt2, "transformer.h.1", GPT2_BLOCK)],
    ids=["llama", "gpt2"],
)
def test_blocks_become_fused_modules_and_the_way_back_is_exact(make, path, expected):
    model = scattered(make())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    attributes = {name: list(module.__dict__) for name, module in model.named_modules()}
    ids = tokens()
    with torch.no_grad():
        logits = model(ids).logits
    generator = torch.get_rng_state()
    elements = sum(parameter.numel() for parameter in model.parameters())
    report = convert(model, fuse=True)
    assert torch.equal(torch.get_rng_state(), generator)
    assert report.unfused == ()
    assert [module.class_name.removesuffix("Dropout") for module in report.fused] == [
        "quaver LayerNormLinear",
        "quaver LayerNormMLP",
    ] * 2
    block = model.get_submodule(path)
    found = block.state_dict()
    assert set(found) == set(expected)
    for name, shape in expected.items():
        assert shape is None or tuple(found[name].shape) == shape
        assert found[name].is_contiguous()
    with torch.no_grad():
        difference = (model(ids).logits - logits).abs().max()
    assert difference <= 1e-5 * logits.abs().max()
    assert sum(parameter.numel() for parameter in model.parameters()) == elements
    kept = {id(parameter) for parameter in model.parameters()}
    assert all(p.numel() == 0 for p in parameters.values() if id(p) not in kept)

    report = convert_back(model)
    assert sum("taken apart" in layer.note for layer in report.converted) == 4
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert {n: list(module.__dict__) for n, module in model.named_modules()} == attributes
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, qwen3], ids=["llama", "gpt2", "qwen3"])
@pytest.mark.filterwarnings("ignore")
def test_generation_with_a_cache_gives_the_same_tokens(make, attention):
    model = scattered(make())
    model.set_attn_implementation(attention)
    ids = tokens(2, 6)
    options = {"max_new_tokens": 10, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    with torch.no_grad():
        weights = model(ids, output_attentions=attention == "eager").attentions
    report = convert(model, fuse=True)
    assert len(report.fused) == 4
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    if attention == "eager":
        with torch.no_grad():
            after = model(ids, output_attentions=True).attentions
        for mine, theirs in zip(after, weights, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def test_qwen3_joins_its_projections_in_order_with_their_biases():
    model = scattered(qwen3())
    attention = model.model.layers[0].self_attn
    rows = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight = torch.cat([layer.weight.detach() for layer in rows])
    bias = torch.cat([layer.bias.detach() for layer in rows])
    convert(model, fuse=True)
    fused = model.model.layers[0].input_layernorm
    assert isinstance(fused, qv.nn.LayerNormLinear)
    assert torch.equal(fused.weight, weight)
    assert torch.equal(fused.bias, bias)
    assert [layer.weight for layer in rows] == [None, None, None]


def test_training_in_high_precision_equals_the_unfused_model_and_survives_the_way_back():
    model = scattered(tiny_llama(1)).train()
    twin = copy.deepcopy(model)
    convert(twin, fuse=True)
    ids = tokens()
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            each(ids, labels=ids).loss.backward()
            optimizer.step()
    convert_back(twin)
    for name, parameter in model.named_parameters():
        other = twin.get_parameter(name)
        assert torch.allclose(parameter, other, rtol=1e-4, atol=1e-6)
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model = scattered(tiny_llama(1)).train()
    convert(model, DelayedScaling(), fuse=True)
    ids = tokens()
    model(ids, labels=ids).loss.backward()  # the scales are known after it
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    twin.enable_input_require_grads()
    for each in (model, twin):
        each.zero_grad()
        each(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


def test_the_dropout_of_gpt2_stays():
    model = tiny_gpt2(1)
    mlp = model.transformer.h[0].mlp
    mlp.dropout.p = 0.5
    convert(model, fuse=True)
    x = torch.randn(4, 32)
    model.eval()
    expected = mlp(x)
    model.train()
    dropped = mlp(x)
    kept = dropped != 0
    assert 0.2 < kept.float().mean() < 0.8
    assert torch.equal(dropped[kept], (2 * expected)[kept])


def test_a_fused_state_dict_is_loaded_into_a_model_fused_alike():
    model = scattered(tiny_llama(1))
    convert(model, fuse=True)
    other = tiny_llama(1)
    convert(other, fuse=True)
    other.load_state_dict(model.state_dict())
    convert_back(other)
    convert_back(model)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_copies_and_pickles_are_fused_and_taken_apart_on_their_own():
    model = scattered(tiny_gpt2(1))
    ids = tokens()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model, fuse=True)
    with torch.no_grad():
        expected = model(ids).logits
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert torch.equal(twin(ids).logits, expected)
            convert_back(twin)
            assert all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())
        assert isinstance(model.transformer.h[0].mlp, qv.nn.LayerNormMLP)
        assert torch.equal(model(ids).logits, expected)


def test_a_second_call_replaces_the_recipe_and_fuses_nothing_twice():
    model = tiny_llama(1)
    convert(model, fuse=True)
    report = convert(model, DelayedScaling(), fuse=True)
    assert report.fused == ()
    assert {layer.name for layer in report.converted} == {
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp",
        "model.layers.0.self_attn.o_proj",
    }
    assert model.model.layers[0].mlp.recipe == DelayedScaling()
    convert_back(model)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_a_hook_on_what_was_fused_warns():
    model = tiny_llama(1)
    convert(model, fuse=True)
    block = model.model.layers[0]
    for hook in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        with pytest.warns(UserWarning, match="a hook on it never runs; register hooks before"):
            getattr(block.mlp.up_proj, f"register_{hook}")(print).remove()
        with pytest.warns(UserWarning, match="sees what was to be normed"):
            getattr(block.post_attention_layernorm, f"register_{hook}")(print).remove()
    convert_back(model)
    block.mlp.up_proj.register_forward_hook(print).remove()


def test_the_parts_say_what_they_are_if_they_are_used_alone():
    model = tiny_llama(1)
    convert(model, fuse=True)
    block = model.model.layers[0]
    with pytest.raises(qv.QuaverError, match="64 columns, not shape"):
        block.self_attn.q_proj(torch.randn(2, 32))
    with pytest.raises(qv.QuaverError, match="part of the fused module"):
        block.mlp.up_proj(torch.randn(2, 32))
    with pytest.raises(ConversionError, match="q_proj is fused with others"):
        convert_back(block.self_attn)
    convert_back(model)
    assert block.self_attn.q_proj(torch.randn(2, 32)).shape == (2, 32)
