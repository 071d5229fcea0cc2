"""LayerNormMLP with every activation; what it shares with LayerNormLinear is in test_prenorm.py."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import quaver as qv
from quaver.kernels.activation.names import GATED, PLAIN
from tests.integration.helpers import assert_same
from tests.integration.recipes import RECIPES
from tests.nn.fused import Emulation, step
from tests.samples import normal


def clamped(x, limit=7.0, alpha=1.702):
    gate, value = x.chunk(2, -1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (1 + value)


def gated(function):
    def run(x):
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return run


UNGATED = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
PLAIN_FORMS = {name: UNGATED[name] for name in PLAIN}
PLAIN_FORMS |= {name: gated(UNGATED[GATED[name]]) for name in GATED if name != "clamped_swiglu"}
PLAIN_FORMS["clamped_swiglu"] = clamped

every_activation = pytest.mark.parametrize("activation", PLAIN_FORMS)


def make(activation: str, **options) -> qv.LayerNormMLP:
    torch.manual_seed(2)
    module = qv.LayerNormMLP(24, 40, activation=activation, **options)
    module.qualified_name = "mlp"
    return module


def x_of(dtype=torch.float32) -> torch.Tensor:
    return normal(5, 24, dtype=dtype) * 4


@every_activation
def test_it_equals_torchs_functions(activation) -> None:
    module = make(activation)

    def plain(x):
        n = F.layer_norm(x, (24,), module.layer_norm_weight, module.layer_norm_bias)
        hidden = PLAIN_FORMS[activation](F.linear(n, module.fc1_weight, module.fc1_bias))
        return F.linear(hidden, module.fc2_weight, module.fc2_bias)

    assert module.fc1_weight.shape == (80 if activation in GATED else 40, 24)
    assert module.fc2_weight.shape == (24, 40)
    got, expected = step(module, module, x_of()), step(plain, module, x_of())
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=2e-5, atol=2e-5)


@every_activation
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_in_fp8_it_equals_an_emulation_bit_for_bit(activation, recipe) -> None:
    module = make(activation, recipe=RECIPES[recipe], dtype=torch.bfloat16)
    expected = Emulation(module, RECIPES[recipe]).step(
        x_of(torch.bfloat16), normal(5, 24, dtype=torch.bfloat16, name="grad")
    )
    assert_same(step(module, module, x_of(torch.bfloat16)), expected)


def test_parameters_of_the_clamped_gate() -> None:
    module = make("clamped_swiglu", activation_params={"limit": 0.5, "alpha": 1.0})
    n = F.layer_norm(x_of(), (24,))
    hidden = clamped(F.linear(n, module.fc1_weight, module.fc1_bias), 0.5, 1.0)
    expected = F.linear(hidden, module.fc2_weight, module.fc2_bias)
    torch.testing.assert_close(module(x_of()), expected, rtol=1e-5, atol=1e-5)
    usual = make("clamped_swiglu")
    assert not torch.allclose(usual(x_of()), expected, rtol=1e-3)
    with qv.autocast(recipe=RECIPES["current"]):
        quantized = module(x_of())
    assert 0 < (quantized - expected).norm() < 0.1 * expected.norm()
    with pytest.raises(qv.QuaverError, match="activation_params must be limit and alpha of cl"):
        make("swiglu", activation_params={"limit": 0.5})
    with pytest.raises(qv.QuaverError, match="activation_params must be"):
        make("clamped_swiglu", activation_params={"beta": 0.5})


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(qv.QuaverError, match="activation must be one of clamped_swiglu, geglu"):
        make("tanh")


def test_repr_shows_the_options() -> None:
    module = make("swiglu", bias=False, normalization="RMSNorm", zero_centered_gamma=True)
    assert repr(module) == (
        "LayerNormMLP(hidden_size=24, ffn_hidden_size=40, activation=swiglu, bias=False, "
        "normalization=RMSNorm, eps=1e-05, zero_centered_gamma=True)"
    )
    linear = qv.LayerNormLinear(4, 5, return_bias=True, return_layernorm_output=True)
    assert repr(linear) == (
        "LayerNormLinear(in_features=4, out_features=5, bias=True, normalization=LayerNorm, "
        "eps=1e-05, return_bias=True, return_layernorm_output=True)"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_two_products_draw_different_random_bits(recipe) -> None:
    """Two equal gradients, of fc2 and fc1, are rounded with bits of their own (NVFP4)."""
    module = make("relu", recipe=RECIPES[recipe])
    number = module.recipe_states["backward"].last_number()
    module(x_of()).sum().backward()
    after = module.recipe_states["backward"].last_number()
    assert after == (None if number is None else number + 2)
