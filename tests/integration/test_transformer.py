"""Attention and transformer layers with every recipe: over devices, in checkpoints, traced."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.nn import (
    AttentionOptions,
    LayerOptions,
    MultiheadAttention,
    QKNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from quaver.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    equal,
    gradients,
    quantized_modules,
    scaling,
    train_step,
)
from tests.integration.recipes import RECIPES

Devices = list[torch.device]

HIDDEN, HEADS = 32, 4
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
FP8_DPA: dict[str, Recipe] = {
    "delayed_dpa": DelayedScaling(amax_history_len=3, fp8_dpa=True),
    "current_dpa": Float8CurrentScaling(fp8_dpa=True),
}
ALL = RECIPES | FP8_DPA

every_recipe = pytest.mark.parametrize("name", ALL)


class Model(nn.Module):
    """Layers of several kinds, each on its device, with one decoder that attends to the others."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        first, second = devices
        options = AttentionOptions(qk_norm=QKNorm())
        self.rope = RotaryPositionEmbedding(HIDDEN // HEADS, device=first)
        self.llama = TransformerLayer(
            HIDDEN,
            48,
            HEADS,
            num_gqa_groups=2,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            attention=options,
            device=first,
            **STILL,
        )
        self.attention = MultiheadAttention(HIDDEN, HEADS, device=second)
        self.decoder = TransformerLayer(
            HIDDEN,
            48,
            HEADS,
            layer_type="decoder",
            options=LayerOptions(apply_residual_connection_post_layernorm=True),
            device=second,
            **STILL,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.llama(x, rotary_pos_emb=self.rope(x.shape[1]))
        x = x.to(self.attention.proj.weight.device)
        return self.decoder(self.attention(x), encoder_output=x)


class Llama(nn.Module):
    """The model's first layer with its rotary embedding."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.rope, self.llama = model.rope, model.llama

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.llama(x, rotary_pos_emb=self.rope(x.shape[1]))


def twins(split: Devices, whole: Devices) -> tuple[Model, Model]:
    left, right = Model(split), Model(whole)
    right.load_state_dict(left.state_dict())
    return left, right


@every_recipe
def test_a_split_model_equals_the_unsplit_bit_for_bit(devices: Devices, name: str) -> None:
    here = devices[0]
    split, whole = twins(devices, [here, here])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (split, whole)]
    outputs = set()
    for step in range(4):
        x, grad = torch.randn(2, 5, HIDDEN).to(here) * 2**step, torch.randn(2, 5, HIDDEN)
        with launches() as log:
            results = train_step(split, x, grad, ALL[name])
        assert_guarded(log, devices)
        assert_same(results, train_step(whole, x, grad, ALL[name]))
        outputs.add(results["y"].sum().item())
        for optimizer in optimizers:
            optimizer.step()
    assert len(outputs) == 4
    assert scaling(split).keys() == scaling(whole).keys()
    for key, value in scaling(split).items():
        assert equal(value, scaling(whole)[key]), key
    with_dpa = {n for n, m in quantized_modules(split).items() if n.endswith("core_attention")}
    assert len(with_dpa) == 4
    for module_name, module in quantized_modules(split).items():
        used = module_name not in with_dpa or name in FP8_DPA
        assert bool(module.recipe_states) == used, module_name
        place = here if module_name.startswith("llama") else devices[1]
        assert {state.device for state in module.recipe_states.values()} <= {place}


@every_recipe
def test_it_is_near_high_precision(name: str) -> None:
    model = Model([torch.device("cpu")] * 2)
    x, grad = torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)
    got = train_step(model, x, grad, ALL[name])["y"]
    with torch.no_grad():
        exact = model(x)
    off = (got - exact).norm() / exact.norm()
    assert 0 < off < (0.3 if name == "nvfp4" else 0.1)


@pytest.mark.parametrize("name", ["delayed", "delayed_dpa", "nvfp4"])
def test_a_checkpoint_goes_on_elsewhere(devices: Devices, name: str) -> None:
    trained, restored = Model([devices[0]] * 2), Model(devices)
    recipe = ALL[name]
    for _ in range(2):
        x, grad = torch.randn(2, 5, HIDDEN).to(devices[0]), torch.randn(2, 5, HIDDEN)
        train_step(trained, x, grad, recipe)
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        x, grad = torch.randn(2, 5, HIDDEN).to(devices[0]), torch.randn(2, 5, HIDDEN)
        results = train_step(restored, x, grad, recipe)
        assert_same(results, train_step(trained, x, grad, recipe))
    assert_same(scaling(restored), scaling(trained))


@pytest.mark.parametrize("name", ["delayed_dpa", "current_dpa", "block"])
def test_recomputation_changes_nothing(devices: Devices, name: str) -> None:
    here = devices[1]
    plain, again = twins([here, here], [here, here])
    for _ in range(3):
        x, grad = torch.randn(2, 5, HIDDEN).to(here), torch.randn(2, 5, HIDDEN).to(here)
        expected = train_step(plain, x, grad, ALL[name])
        again.zero_grad()
        with qv.autocast(recipe=ALL[name]):
            y = checkpoint(again, x, use_reentrant=False)
        y.backward(grad)
        assert equal(y, expected["y"])
        assert_same(gradients(again), gradients(plain))
    if scaling(plain):
        assert_same(scaling(again), scaling(plain))
    assert bool(scaling(plain)) == (name == "delayed_dpa")


def test_moves_and_copies(devices: Devices) -> None:
    recipe = FP8_DPA["delayed_dpa"]
    model = Model([devices[0]] * 2)
    x, grad = torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)
    train_step(model, x.to(devices[0]), grad, recipe)
    moved = copy.deepcopy(model).to(devices[1])
    for module in quantized_modules(moved).values():
        assert {state.device for state in module.recipe_states.values()} == {devices[1]}
    results = train_step(moved, x.to(devices[1]), grad, recipe)
    assert_same(results, train_step(model, x.to(devices[0]), grad, recipe))


def test_later_microbatches_reuse_every_quantized_weight(devices: Devices) -> None:
    model = Llama(Model(devices))
    x = torch.randn(2, 5, HIDDEN).to(devices[0])
    with torch.no_grad(), qv.autocast(recipe=ALL["current"]):
        expected = model(x)
        freqs = model.rope(5)
        first = model.llama(x, rotary_pos_emb=freqs, is_first_microbatch=True)
        for module in quantized_modules(model).values():
            for name, parameter in module.named_parameters():
                if name.endswith("weight") and parameter.dim() == 2:
                    parameter.zero_()
        later = model.llama(x, rotary_pos_emb=freqs, is_first_microbatch=False)
        assert equal(first, expected)
        assert equal(later, expected)
        assert not equal(model(x), expected)


def test_on_the_meta_device_it_gives_shapes(devices: Devices) -> None:
    meta = torch.device("meta")
    model = Model([meta, meta])
    with qv.autocast(recipe=FP8_DPA["delayed_dpa"]):
        y = model(torch.zeros(2, 5, HIDDEN, device=meta))
    assert (y.shape, y.device) == ((2, 5, HIDDEN), meta)
    model.to_empty(device=devices[1])
    assert model.rope(5).device == devices[1]


def test_replicas_of_a_converted_model_may_attend(devices: Devices) -> None:
    layer = TransformerLayer(HIDDEN, 48, HEADS, recipe=RECIPES["current"], **STILL)
    replica = copy.deepcopy(layer)
    for module in replica.modules():
        module._is_replica = True
    x = torch.randn(2, 5, HIDDEN)
    assert equal(replica(x), layer(x))


# ---- torch.compile


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed_dpa", "block"])
def test_it_is_traced_whole_and_equal_to_eager(devices: Devices, name: str) -> None:
    eager = Llama(Model([devices[1]] * 2))
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for index in range(3):
        x = torch.randn(2, 5, HIDDEN, device=devices[1]) * 2.0**index
        grad = torch.randn(2, 5, HIDDEN)
        expected = train_step(eager, x, grad, ALL[name])
        traced.zero_grad()
        with (
            torch._dynamo.config.patch(error_on_recompile=index >= 2),
            qv.autocast(recipe=ALL[name]),
        ):
            y = compiled(x)
        y.backward(grad.to(y.device))
        assert equal(y, expected["y"])
        assert_same(gradients(traced), gradients(eager))


@pytest.mark.parametrize("name", ["delayed", "current_dpa"])
def test_dispatched_by_accelerate_it_computes_the_same(devices: Devices, name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = Model([devices[0]] * 2)
    split = copy.deepcopy(whole)
    places = {"rope": devices[0], "llama": devices[0], "attention": devices[1]}
    places["decoder"] = devices[1]
    split = accelerate.dispatch_model(split, places, main_device=devices[0], force_hooks=True)
    x = torch.randn(2, 5, HIDDEN).to(devices[0])
    for step in range(2):
        with launches() as log:
            results = train_step(split, x * 2**step, torch.ones(2, 5, HIDDEN), ALL[name])
        assert_guarded(log, devices)
        assert_same(results, train_step(whole, x * 2**step, torch.ones(2, 5, HIDDEN), ALL[name]))
