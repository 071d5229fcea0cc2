"""Every exported module with every recipe: split over two devices it trains as on one, bit for bit.

Each case is trained for four steps in three places: half of it on each device, whole on the device
that is not current, and whole where sums have the same bits (beside simulated devices the CPU).
What other files show is left out by name, with the file.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import quaver as qv
from quaver import ops
from quaver.kernels.activation.names import GATED, PLAIN
from quaver.nn.attention import AttentionOptions, QKNorm
from quaver.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from quaver.testing import launches
from tests.integration.helpers import assert_same, equal, reference_device, scaling, train_step
from tests.integration.recipes import RECIPES

Devices = list[torch.device]

WIDTH, HEADS, ROWS = 32, 4, 10
SPLITS = [3, 0, 6, 1]
FP8_ATTENTION: dict[str, Recipe] = {
    "delayed_dpa": DelayedScaling(amax_history_len=3, fp8_dpa=True),
    "current_dpa": Float8CurrentScaling(fp8_dpa=True),
    "delayed_mha": DelayedScaling(amax_history_len=3, fp8_dpa=True, fp8_mha=True),
    "current_mha": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
}
ALL = RECIPES | FP8_ATTENTION

OTHERWISE = {
    "Dropout": "draws from each device's own stream: tests/ops/test_simple.py",
    "AllGather": "tests/ops/test_collectives.py",
    "AllReduce": "tests/ops/test_collectives.py",
    "ReduceScatter": "tests/ops/test_collectives.py",
    "QuantizedModule": "a base class",
    "QuantizedLinear": "a base class",
    "FusibleOperation": "a base class",
}


class Case(NamedTuple):
    """A module and how it is called.

    Attributes:
        make: the module, given the device of its parameters.
        call: takes the module and x [2, 5, WIDTH].
        further: recipes that concern it beside those that concern all.
        on_cpu: whether a CPU has the same bits; torch's attention sums in other orders there.
    """

    make: Callable[..., nn.Module]
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda module, x: module(x)
    further: tuple[str, ...] = ()
    on_cpu: bool = True


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, WIDTH // HEADS))


def attend(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(heads(x), heads(x * 0.5), heads(x + 1))


def turn(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return qv.apply_rotary_pos_emb(heads(x), module(x.shape[1]))


def cross(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, encoder_output=x.flip(1))


def group(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x.flatten(0, 1), SPLITS)


def extra(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The extra outputs are added to the output; the first extra input is another x."""
    found = module(x, *[x * 0.5] * module.num_extra_inputs)
    return found if isinstance(found, torch.Tensor) else found[0] + sum(found[1:])


class Aligned(nn.Module):
    """Experts between padding and unpadding."""

    def __init__(self, **place: Any) -> None:
        super().__init__()
        self.pad = qv.Fp8Padding(len(SPLITS))
        self.experts = qv.GroupedLinear(len(SPLITS), WIDTH, WIDTH, **place)
        self.unpad = qv.Fp8Unpadding(len(SPLITS))

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        return self.unpad(self.experts(*self.pad(x, splits)), splits)


def chain(**place: Any) -> nn.Module:
    """Operations with neighbours that they are fused with, and with others."""
    return ops.Sequential(
        ops.LayerNorm(WIDTH, **place),
        ops.Quantize(forward=True, backward=True),
        ops.Linear(WIDTH, 2 * WIDTH, **place),
        ops.ConstantScale(0.7),
        ops.SwiGLU(),
        ops.L2Normalization(),
        ops.Reshape((2, 5, WIDTH)),
        ops.Identity(),
        ops.MakeExtraOutput(),
        ops.RMSNorm(WIDTH, **place),
        ops.BasicLinear(WIDTH, WIDTH, **place),
        ops.Bias(WIDTH, **place),
        ops.AddExtraInput(),
    )


def activated(**place: Any) -> nn.Module:
    """Each activation behind a linear that it is fused with."""
    kinds = (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU)
    gated = (ops.GEGLU, ops.GLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.ClampedSwiGLU)
    parts: list[nn.Module] = []
    for kind in (*kinds, *gated):
        parts += [ops.Linear(WIDTH, WIDTH * (1 + (kind in gated)), **place), kind()]
    return ops.Sequential(*parts)


def attention(**options: Any) -> Callable[..., nn.Module]:
    return lambda **place: qv.MultiheadAttention(WIDTH, HEADS, **options, **place)


def layer(**options: Any) -> Callable[..., nn.Module]:
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return lambda **place: qv.TransformerLayer(WIDTH, 48, HEADS, **still, **options, **place)


def mlp(activation: str) -> Callable[..., nn.Module]:
    return lambda **place: qv.LayerNormMLP(WIDTH, 24, activation=activation, **place)


SEPARATE = AttentionOptions(fuse_qkv_params=False, qk_norm=QKNorm())

CASES: dict[str, Case] = {
    "Linear": Case(lambda **place: qv.Linear(WIDTH, 20, **place)),
    "LayerNorm": Case(lambda **place: qv.LayerNorm(WIDTH, **place)),
    "RMSNorm": Case(lambda **place: qv.RMSNorm(WIDTH, zero_centered_gamma=True, **place)),
    "LayerNormLinear": Case(lambda **place: qv.LayerNormLinear(WIDTH, 20, **place)),
    **{f"LayerNormMLP {name}": Case(mlp(name)) for name in (*PLAIN, *GATED)},
    "GroupedLinear": Case(
        lambda **place: qv.GroupedLinear(len(SPLITS), WIDTH, 24, **place), call=group
    ),
    "padded experts": Case(Aligned, call=group),
    "DotProductAttention": Case(
        lambda **place: qv.DotProductAttention(
            HEADS, WIDTH // HEADS, softmax_type="learnable", device=place["device"]
        ),
        attend,
        ("delayed_dpa", "current_dpa"),
    ),
    "RotaryPositionEmbedding": Case(
        lambda **place: qv.RotaryPositionEmbedding(WIDTH // HEADS, **place), turn
    ),
    "MultiheadAttention": Case(
        attention(num_gqa_groups=2, options=SEPARATE), further=tuple(FP8_ATTENTION), on_cpu=False
    ),
    "MultiheadAttention cross": Case(
        attention(attention_type="cross", input_layernorm=True, attn_mask_type="no_mask"),
        cross,
        tuple(FP8_ATTENTION),
        on_cpu=False,
    ),
    "TransformerLayer": Case(
        layer(normalization="RMSNorm", activation="swiglu", bias=False),
        further=tuple(FP8_ATTENTION),
        on_cpu=False,
    ),
    "TransformerLayer decoder": Case(
        layer(layer_type="decoder"), cross, tuple(FP8_ATTENTION), on_cpu=False
    ),
    "chain": Case(chain, extra),
    "activated": Case(activated),
    "ops.GroupedLinear": Case(
        lambda **place: ops.GroupedLinear(len(SPLITS), WIDTH, 24, **place), call=group
    ),
}
EVERY_RECIPE_BY_DEFAULT = "LayerNormMLP swiglu"


def combinations() -> list[Any]:
    found = []
    for case, entry in CASES.items():
        for recipe in (*RECIPES, *entry.further):
            rare = recipe != "delayed" and case != EVERY_RECIPE_BY_DEFAULT
            marks = (pytest.mark.slow,) if rare else ()
            found.append(pytest.param(case, recipe, marks=marks))
    return found


class Two(nn.Module):
    """Two modules of a case, each on its device, whose outputs are added."""

    def __init__(self, case: Case, devices: Devices) -> None:
        super().__init__()
        self.case, self.devices = case, devices
        self.parts = nn.ModuleList(case.make(device=device) for device in devices)
        for name, module in self.named_modules():
            module.qualified_name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, there = self.devices
        y = self.case.call(self.parts[0], x.to(here))
        return y.to(there) + self.case.call(self.parts[1], x.to(there))


@pytest.mark.parametrize(("case", "recipe"), combinations())
def test_split_it_trains_as_whole_bit_for_bit(devices: Devices, case: str, recipe: str) -> None:
    here, there = devices
    home = reference_device(devices) if CASES[case].on_cpu else here
    models = [Two(CASES[case], places) for places in (devices, [there, there], [home, home])]
    optimizers = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        if any(True for _ in model.parameters()):
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.01))
    shape = models[0](torch.zeros(2, 5, WIDTH)).shape
    seen = set()
    for index in range(4):
        x = torch.randn(2, 5, WIDTH) * 2.0**index
        grad = torch.randn(shape)
        results = []
        for model in models:
            with launches() as log:
                results.append(train_step(model, x.to(model.devices[0]), grad, ALL[recipe]))
            assert [launch for launch in log if launch.current != launch.device] == []
            assert {launch.device for launch in log} in (set(), set(model.devices))
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])
        seen.add(tuple(results[0]["y"].flatten().tolist()))
        for optimizer in optimizers:
            optimizer.step()
    assert len(seen) == 4
    for model in models[1:]:
        assert scaling(model).keys() == scaling(models[0]).keys()
        for name, value in scaling(model).items():
            assert equal(value, scaling(models[0])[name]), name
        pairs = zip(model.parameters(), models[0].parameters(), strict=True)
        assert all(torch.equal(left.cpu(), right.cpu()) for left, right in pairs)


def test_no_exported_module_is_missing() -> None:
    exported = {
        kind
        for package in (qv, qv.nn, ops)
        for kind in map(package.__dict__.get, package.__all__)
        if inspect.isclass(kind) and issubclass(kind, nn.Module)
    }
    made = {type(m) for case in CASES.values() for m in case.make(device="cpu").modules()}
    assert {kind.__name__ for kind in exported - made} == set(OTHERWISE)
