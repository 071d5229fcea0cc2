"""Initialization of every module: on meta first, anew, by seed, wherever the parts lie."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.devices import rng_states
from quaver.nn import seeded_init
from quaver.recipe import DelayedScaling, MXFP8BlockScaling
from quaver.tensors import QuantizedTensor
from tests.integration.helpers import assert_same, equal, quantized_modules

MAKERS = {
    "linear": lambda **o: qv.Linear(32, 48, **o),
    "norms": lambda **o: nn.Sequential(
        qv.LayerNorm(32, **o), qv.RMSNorm(32, zero_centered_gamma=True, **o)
    ),
    "grouped": lambda **o: qv.GroupedLinear(2, 32, 48, **o),
    "norm linear": lambda **o: qv.LayerNormLinear(32, 48, zero_centered_gamma=True, **o),
    "norm mlp": lambda **o: qv.LayerNormMLP(32, 48, activation="swiglu", **o),
    "core": lambda **o: qv.DotProductAttention(
        2, 16, softmax_type="learnable", **{k: v for k, v in o.items() if k != "dtype"}
    ),
    "attention": lambda **o: qv.MultiheadAttention(
        32, 2, options=qv.AttentionOptions(fuse_qkv_params=False, qk_norm=qv.QKNorm()), **o
    ),
    "layer": lambda **o: qv.TransformerLayer(32, 48, 2, layer_type="decoder", **o),
    "layer with a norm behind": lambda **o: qv.TransformerLayer(
        32, 48, 2, normalization="RMSNorm", options=qv.LayerOptions(output_layernorm=True), **o
    ),
    "ops": lambda **o: qv.ops.Sequential(
        qv.ops.RMSNorm(32, **o), qv.ops.Linear(32, 48, **o), qv.ops.GELU()
    ),
}
every_module = pytest.mark.parametrize("name", MAKERS)
QUANTIZING = [name for name in MAKERS if name not in ("norms", "core")]


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.dequantize() if isinstance(p, QuantizedTensor) else p).detach().cpu().clone()
        for name, p in module.named_parameters()
    }


def reset(module: nn.Module, seed: int) -> None:
    """As those do who make a model on meta: every part with parameters of its own, in order."""
    torch.manual_seed(seed)
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.reset_parameters()


def made(name: str, seed: int = 3, quantized: bool = False, **options) -> nn.Module:
    torch.manual_seed(seed)
    with qv.quantized_model_init(enabled=quantized, recipe=MXFP8BlockScaling()):
        return MAKERS[name](**options)


@pytest.mark.parametrize("quantized", [False, True])
@every_module
def test_from_meta_it_gets_what_it_would_have_been_made_with(
    devices, name: str, quantized: bool
) -> None:
    module = made(name, quantized=quantized, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device=devices[1])
    reset(module, 3)
    assert {p.device for p in module.parameters()} == {devices[1]}
    assert_same(values(module), values(made(name, quantized=quantized, device=devices[1])))
    kinds = {isinstance(p, QuantizedTensor) for p in module.parameters() if p.dim() == 2}
    assert kinds <= {quantized}


@every_module
def test_under_a_meta_context_nothing_is_allocated(name: str) -> None:
    with torch.device("meta"):
        module = MAKERS[name]()
    tensors = [*module.parameters(), *module.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}


@every_module
def test_a_deferred_module_loads_a_state_dict(devices, name: str) -> None:
    source = made(name)
    module = MAKERS[name](device="meta").to_empty(device=devices[1])
    module.load_state_dict(source.state_dict())
    assert_same(values(module), values(source))
    assigned = MAKERS[name](device="meta")
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert_same(values(assigned), values(source))


@every_module
def test_to_reset_again_changes_nothing_but_the_values(devices, name: str) -> None:
    module = made(name, device=devices[1])
    first, ids = values(module), {key: id(p) for key, p in module.named_parameters()}
    reset(module, 3)
    assert_same(values(module), first)
    reset(module, 4)
    reset(module, 3)
    assert_same(values(module), first)
    assert ids == {key: id(p) for key, p in module.named_parameters()}
    drawn = [key for key, value in first.items() if value.unique().numel() > 1]
    reset(module, 4)
    assert all(not equal(values(module)[key], first[key]) for key in drawn)


@pytest.mark.parametrize("name", QUANTIZING)
def test_a_reset_forgets_the_scales_of_the_weights_that_were(devices, name: str) -> None:
    module, recipe = made(name, device=devices[1]), DelayedScaling()
    states = []
    for part in quantized_modules(module).values():
        if hasattr(part, "set_weight_scale"):
            part.recipe = recipe
            part.set_weight_scale()
            states.append(part.recipe_states["forward"])
            states[-1].ready.fill_(1.0)  # as after a step
    reset(module, 3)
    for state in states:
        assert state.ready.view(-1, 3).tolist() == [[1.0, 0.0, 1.0]] * (state.num_quantizers // 3)
    assert states


@every_module
def test_a_seed_gives_the_same_on_each_device_whichever_is_current(devices, name: str) -> None:
    results = []
    for device in devices:
        for current in devices:
            with qv.devices.on_device(current):
                results.append(values(made(name, device=device)))
    for each in results[1:]:
        assert_same(each, results[0])


# ---- seeds


class Split(nn.Module):
    """Modules over two devices, or all on one."""

    def __init__(self, places: list[torch.device | str]) -> None:
        super().__init__()
        first, second = places
        self.linear = qv.Linear(32, 32, device=first)
        self.experts = qv.GroupedLinear(2, 32, 32, device=second)
        self.layer = qv.TransformerLayer(32, 48, 2, layer_type="decoder", device=first)
        self.last = qv.LayerNormLinear(32, 48, device=second)
        self.op = qv.ops.Linear(48, 16, device=second)


def seeded(seed: int, places: list[torch.device | str]) -> nn.Module:
    with seeded_init(seed):
        return Split(places)


def test_a_seed_gives_the_same_whatever_the_split(devices) -> None:
    first, second = devices
    whole = seeded(5, [first, first])
    for places in ([first, second], [second, first], [second, second]):
        torch.rand(3, device=second)  # what was drawn there before does not matter
        split = seeded(5, places)
        assert {p.device for p in split.last.parameters()} == {places[1]}
        assert_same(values(split), values(whole))
    torch.manual_seed(5)  # without it, a split would draw other numbers
    apart = Split([first, second])
    torch.manual_seed(5)
    assert not equal(
        Split([first, first]).layer.layernorm_mlp.fc1_weight, apart.layer.layernorm_mlp.fc1_weight
    )


def test_each_module_and_each_seed_draws_others(devices) -> None:
    drawn = [value for value in values(seeded(5, devices)).values() if value.unique().numel() > 1]
    other = [value for value in values(seeded(6, devices)).values() if value.unique().numel() > 1]
    firsts = [value.flatten()[:4].tolist() for value in [*drawn, *other]]
    assert len({tuple(each) for each in firsts}) == len(firsts)


def test_deferred_it_gives_the_same(devices) -> None:
    with seeded_init(5):
        module = Split(["meta", "meta"]).to_empty(device=devices[1])
        for part in module.modules():
            if any(True for _ in part.parameters(recurse=False)):
                part.reset_parameters()
    assert_same(values(module), values(seeded(5, devices)))


def test_the_generators_go_on_as_if_nothing_had_been_drawn(devices) -> None:
    before = rng_states()
    seeded(5, devices)
    after = rng_states()
    assert all(torch.equal(state, after[device]) for device, state in before.items())
    with seeded_init(5), qv.quantized_model_init(recipe=MXFP8BlockScaling()):
        quantized = qv.Linear(32, 32)
    with seeded_init(5):
        plain = qv.Linear(32, 32)
    expected = qv.MXFP8Quantizer(torch.float8_e4m3fn)(plain.weight)
    assert torch.equal(quantized.weight.dequantize(), expected.dequantize())


@pytest.mark.parametrize("seed", [-1, 2**31, 0.5])
def test_a_wrong_seed(seed) -> None:
    with pytest.raises(ValueError, match="seed must be an integer from 0 to 2"), seeded_init(seed):
        pass
