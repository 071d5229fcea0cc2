"""Options that the linear modules hand on: returned biases, initial values, weights' gradients."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling, Float8CurrentScaling
from tests.integration.helpers import assert_same, equal, gradients
from tests.integration.recipes import RECIPES

RECIPE = Float8CurrentScaling()
every_recipe = pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["plain", *RECIPES])
SPLITS = [3, 0, 5]


def run(module: nn.Module, recipe, *inputs) -> object:
    with qv.autocast(enabled=recipe is not None, recipe=recipe):
        return module(*inputs)


# ---- return_bias


@every_recipe
def test_a_linear_returns_its_bias(recipe) -> None:
    linear, whole = qv.Linear(32, 48, return_bias=True), qv.Linear(32, 48)
    whole.load_state_dict(linear.state_dict())
    x = torch.randn(8, 32).bfloat16()
    y, bias = run(linear, recipe, x.float())
    assert torch.equal(bias, linear.bias)
    assert not torch.equal(y, run(whole, recipe, x.float()))
    torch.testing.assert_close(y + bias, run(whole, recipe, x.float()), rtol=1e-5, atol=1e-6)
    (y + bias).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((48,), 8.0))
    if recipe is not None:
        y, bias = run(linear, recipe, x)
        assert (y.dtype, bias.dtype) == (torch.bfloat16, torch.bfloat16)
        assert run(qv.Linear(32, 48, bias=False, return_bias=True), recipe, x)[1] is None


@every_recipe
def test_experts_return_their_biases(recipe) -> None:
    experts = qv.GroupedLinear(3, 32, 48, return_bias=True)
    whole = qv.GroupedLinear(3, 32, 48)
    whole.load_state_dict(experts.state_dict())
    x = torch.randn(8, 32)
    y, biases = run(experts, recipe, x, SPLITS)
    assert len(biases) == 3
    assert torch.equal(biases[2], experts.bias2)
    added = torch.cat([part + b for part, b in zip(y.split(SPLITS), biases, strict=True)])
    torch.testing.assert_close(added, run(whole, recipe, x, SPLITS), rtol=1e-5, atol=1e-6)
    added.sum().backward()
    assert experts.bias0.grad.eq(3).all()
    _, biases = qv.GroupedLinear(3, 32, 48, bias=False, return_bias=True)(x, SPLITS)
    assert biases == [None, None, None]


@pytest.mark.parametrize("normed", [False, True])
def test_attention_returns_its_last_bias(normed: bool) -> None:
    options = {"input_layernorm": True, "return_layernorm_output": True} if normed else {}
    attention = qv.MultiheadAttention(16, 2, return_bias=True, **options)
    whole = qv.MultiheadAttention(16, 2, **options)
    whole.load_state_dict(attention.state_dict())
    x = torch.randn(2, 5, 16)
    y, bias, *rest = run(attention, RECIPE, x)
    expected = run(whole, RECIPE, x)
    if normed:
        expected, normed_input = expected
        assert torch.equal(rest[0], normed_input)
    assert len(rest) == int(normed)
    assert torch.equal(bias, attention.proj.bias)
    torch.testing.assert_close(y + bias, expected, rtol=1e-5, atol=1e-6)


def test_calibration_without_the_bias() -> None:
    linear, recipe = qv.Linear(32, 48, return_bias=True), DelayedScaling()
    x = torch.randn(8, 32)
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=recipe):
        y, _ = linear(x)
    assert torch.equal(y, nn.functional.linear(x, linear.weight))
    assert linear.recipe_states["forward"].ready[0] == 1


# ---- init_method


def half(weight: torch.Tensor) -> None:
    weight.fill_(0.5)


def third(weight: torch.Tensor) -> None:
    weight.fill_(0.375)


MAKERS = {
    "linear": lambda **o: qv.Linear(32, 48, init_method=half, **o),
    "grouped": lambda **o: qv.GroupedLinear(2, 32, 48, init_method=half, **o),
    "norm linear": lambda **o: qv.LayerNormLinear(32, 48, init_method=half, **o),
    "norm mlp": lambda **o: qv.LayerNormMLP(
        32, 48, init_method=half, output_layer_init_method=third, **o
    ),
    "attention": lambda **o: qv.MultiheadAttention(
        32, 2, init_method=half, output_layer_init_method=third, **o
    ),
    "layer": lambda **o: qv.TransformerLayer(
        32, 48, 2, layer_type="decoder", init_method=half, output_layer_init_method=third, **o
    ),
}
LAST = ("proj.weight", "fc2_weight")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_init_method_fills_each_weight(name: str, quantized: bool) -> None:
    with qv.quantized_model_init(enabled=quantized, recipe=RECIPE):
        module = MAKERS[name]()
    for _ in range(2):
        for key, parameter in module.named_parameters():
            if "layer_norm" in key:
                continue
            if "weight" not in key:
                assert parameter.eq(0).all(), key
                continue
            assert isinstance(parameter, qv.Float8Tensor) == quantized
            value = parameter.dequantize() if quantized else parameter
            assert value.eq(0.375 if key.endswith(LAST) else 0.5).all(), key
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.full(parameter.shape, 3.0))
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()


# ---- wgrad


@pytest.mark.parametrize("name", ["attention", "layer"])
@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "fp8"])
def test_weights_gradients_are_put_off_and_added_to_main_grad(name: str, recipe) -> None:
    options = qv.WgradOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    if name == "attention":
        module, plain = (qv.MultiheadAttention(16, 2, wgrad=o) for o in (options, None))
    else:
        module, plain = (
            qv.TransformerLayer(
                16, 32, 2, layer_type="decoder", hidden_dropout=0, attention_dropout=0, wgrad=o
            )
            for o in (options, None)
        )
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 5, 16)
    more = {} if name == "attention" else {"encoder_output": torch.randn(2, 3, 16)}
    matrices = {key: p for key, p in module.named_parameters() if p.dim() == 2}
    for p in matrices.values():
        p.main_grad = torch.zeros_like(p)
    for each in (module, plain):
        with qv.autocast(enabled=recipe is not None, recipe=recipe):
            y = each(x, **more)
        y.square().sum().backward()
    assert all(p.grad is None and p.main_grad.eq(0).all() for p in matrices.values())
    module.backward_dw()
    expected = gradients(plain)
    for key, p in matrices.items():
        assert equal(p.main_grad, expected[key]), key
    assert all(p.grad is not None for key, p in module.named_parameters() if key not in matrices)
    module.backward_dw()  # nothing is left
    assert_same({k: p.main_grad for k, p in matrices.items()}, {k: expected[k] for k in matrices})


def test_what_a_norm_before_it_cannot_save_is_refused() -> None:
    options = qv.WgradOptions(save_original_input=True)
    with pytest.raises(qv.RecipeError, match="save_original_input cannot be used by LayerNorm"):
        qv.TransformerLayer(16, 32, 2, wgrad=options)
    qv.MultiheadAttention(16, 2, wgrad=options)
