"""convert with every recipe: attached, mixed by rules, per role, with quantized weights."""

import copy
import io

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import quaver as qv
from quaver.conversion import Rule
from quaver.errors import RecipeError
from quaver.formats import E4M3, E5M2
from quaver.quantizers import Quantizer
from quaver.recipe import CustomRecipe, Role
from quaver.testing import launches
from tests.conversion.models import Mlp, calibrate, tiny_gpt2, tiny_llama, tokens
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    gradients,
    quantized_modules,
    train_step,
)
from tests.integration.recipes import BOUNDS, RECIPES, TENSORS, error, parts
from tests.integration.test_frameworks import device_map

Devices = list[torch.device]

every_recipe = pytest.mark.parametrize("name", RECIPES)
another_recipe = pytest.mark.filterwarnings("ignore:the recipe changes")


class Conv1DMlp(nn.Module):
    """transformers' Conv1D instead of nn.Linear: fc1, fc2."""

    def __init__(self, features: int = 30) -> None:
        super().__init__()
        self.fc1 = Conv1D(2 * features, features)
        self.fc2 = Conv1D(features, 2 * features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step without any autocast."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(model)}


def quantized_weights(model: nn.Module) -> dict[str, type]:
    return {name: type(module.weight) for name, module in quantized_modules(model).items()}


# ---- an attached recipe


@every_recipe
def test_each_call_runs_with_the_attached_recipe(devices: Devices, name: str) -> None:
    model = Mlp(32).to(devices[1])
    twin = copy.deepcopy(model)
    report = qv.convert(model, RECIPES[name])
    assert [layer.recipe for layer in report.converted] == [RECIPES[name]] * 2
    assert type(RECIPES[name]).__name__ in str(report)
    x = torch.randn(8, 32, device=devices[1])
    with launches() as log:
        results = step(model, x)
    assert_guarded(log, [devices[1]])
    assert [launch.kernel for launch in log].count("scaled_mm") == 2 * 3
    exact = step(twin, x)
    for key, value in results.items():
        assert error(value, exact[key]) < 5 * BOUNDS[name], key
    assert not equal(results["y"], exact["y"])
    for layer in (model.fc1, model.fc2):
        assert_state_devices(layer, devices[1])
    table = str(qv.status(model))
    assert type(RECIPES[name]).__name__ in table
    assert {layer.calibrated for layer in qv.status(model).layers} == {True}
    qv.convert_back(model)
    assert_same(step(model, x), exact)


@every_recipe
@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_llama_dispatched_over_two_devices_equals_the_undispatched(
    devices: Devices, name: str, weights: str
) -> None:
    model = tiny_llama()
    qv.convert(model, RECIPES[name], weights=weights)
    ids = tokens()
    calibrate(model, ids)
    whole = copy.deepcopy(model).to(devices[0])
    dispatch_model(model, device_map(devices))
    with torch.no_grad(), launches() as log:
        split = model(ids.to(devices[0])).logits
    assert_guarded(log, devices)
    with torch.no_grad():
        assert equal(split, whole(ids.to(devices[0])).logits)
    for path, layer in quantized_modules(model).items():
        place = devices[1] if ".layers.1." in path else devices[0]
        assert_state_devices(layer, place)
        if weights == "quantize":
            assert {part.device for part in parts(layer.weight).values()} == {place}


# ---- several recipes


def test_rules_give_layers_recipes_of_their_own(devices: Devices) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in RECIPES)).to(devices[1])
    alone = copy.deepcopy(model)
    rules = [Rule(str(i), recipe=recipe) for i, recipe in enumerate(RECIPES.values())]
    report = qv.convert(model, RECIPES["current"], rules=rules)
    assert [layer.recipe for layer in report.converted] == [*RECIPES.values()]
    assert not report.unmatched_rules
    x = torch.randn(4, 32, device=devices[1])
    with launches() as log:
        results = step(model, x)
    assert_guarded(log, [devices[1]])
    kernels = [launch.kernel.removesuffix("_grad") for launch in log]
    for kernel in ("cast", "current_cast", "block_cast", "mx_cast", "nvfp4_cast"):
        assert kernels.count(kernel) >= 3, kernel
    for path, layer in enumerate(alone):
        twin = nn.Sequential(layer)
        qv.convert(twin, list(RECIPES.values())[path])
        twin[0].qualified_name = str(path)
        x = twin(x)
    assert equal(results["y"], x)


@another_recipe
def test_a_later_convert_replaces_the_recipe(devices: Devices) -> None:
    model = Mlp(32).to(devices[1])
    fresh = copy.deepcopy(model)
    qv.convert(model, RECIPES["delayed"])
    x = torch.randn(4, 32, device=devices[1])
    step(model, x)
    qv.convert(model, RECIPES["mxfp8"])
    results = step(model, x)
    qv.convert(fresh, RECIPES["mxfp8"])
    assert_same(results, step(fresh, x))


# ---- CustomRecipe


def by_role(role: Role) -> Quantizer | None:
    """NVFP4 in the first layer; in the second MXFP8 forward and a plain gradient."""
    if role.module_name.endswith("fc1"):
        return qv.NVFP4Quantizer(two_dimensional=role.tensor == "weight")
    return None if role.tensor == "grad_output" else qv.MXFP8Quantizer(E4M3)


def test_a_custom_recipe_chooses_by_role_and_name(devices: Devices) -> None:
    roles: list[Role] = []

    def factory(role: Role) -> Quantizer | None:
        roles.append(role)
        return by_role(role)

    model = Mlp(32).to(devices[1])
    qv.convert(model, CustomRecipe(factory))
    x = torch.randn(4, 32, device=devices[1])
    with launches() as log:
        results = step(model, x)
    kernels = [launch.kernel for launch in log]
    assert (kernels.count("nvfp4_cast"), kernels.count("mx_cast")) == (3, 2)
    assert set(roles) == {
        Role(tensor, name, "Linear")
        for tensor in ("input", "weight", "grad_output")
        for name in ("fc1", "fc2")
    }
    assert len(roles) == 6  # once for each tensor of a module
    step(model, x)
    assert len(roles) == 6
    quantizer = qv.MXFP8Quantizer(E4M3)
    hidden = torch.relu(qv_forward(model.fc1, x))
    h, w = (quantizer(t.detach()).dequantize() for t in (hidden, model.fc2.weight))
    y = nn.functional.linear(nn.functional.linear(h, w, model.fc2.bias), model.lm_head.weight)
    assert torch.allclose(results["y"].to(y.device), y, rtol=1e-5, atol=1e-5)


def qv_forward(layer: qv.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


@another_recipe
def test_custom_recipes_nest_in_rules_and_autocast(devices: Devices) -> None:
    """The innermost choice counts: a rule's recipe over convert's, autocast's over both."""
    model = Mlp(32).to(devices[1])
    custom = CustomRecipe(by_role)
    qv.convert(model, RECIPES["block"], rules=[Rule("fc1", recipe=custom)])
    assert (model.fc1.recipe, model.fc2.recipe) == (custom, RECIPES["block"])
    x = torch.randn(4, 32, device=devices[1])

    def casts() -> set[str]:
        with torch.no_grad(), launches() as log:
            model(x)
        return {launch.kernel for launch in log if launch.kernel.endswith("cast")}

    assert casts() == {"nvfp4_cast", "block_cast"}
    with qv.autocast(recipe=RECIPES["mxfp8"]):
        assert casts() == {"mx_cast"}
        with qv.autocast(recipe=custom):
            assert casts() == {"nvfp4_cast", "mx_cast"}
        with qv.autocast():  # names none: the attached ones
            assert casts() == {"nvfp4_cast", "block_cast"}
        with qv.autocast(enabled=False):
            assert casts() == set()
        assert casts() == {"mx_cast"}


def test_what_a_factory_must_return(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    x = torch.randn(4, 16, device=devices[1])
    with (
        pytest.raises(RecipeError, match="must return a quantizer or None, not 'fp8' for Role"),
        qv.autocast(recipe=CustomRecipe(lambda role: "fp8")),
    ):
        layer(x)
    with pytest.raises(RecipeError, match="qfactory must be a function"):
        CustomRecipe("fp8")
    with qv.autocast(recipe=CustomRecipe(lambda role: None)):  # high precision throughout
        assert equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    identity = CustomRecipe(lambda role: qv.IdentityQuantizer())
    results = train_step(layer, x, torch.ones(4, 16), identity)
    assert equal(results["y"], nn.functional.linear(x, layer.weight, layer.bias))
    assert equal(results["weight"], torch.ones(16, 4, device=devices[1]) @ x)


def two_d_everywhere(role: Role) -> Quantizer:
    return qv.Float8BlockQuantizer(E5M2 if role.tensor == "grad_output" else E4M3)


def test_a_product_of_two_2d_operands_is_refused(devices: Devices) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    x = torch.randn(4, 16, device=devices[1])
    with (
        pytest.raises(RecipeError, match="block_scaling_dim"),
        qv.autocast(recipe=CustomRecipe(two_d_everywhere)),
    ):
        layer(x)


# ---- quantized weights


@every_recipe
@pytest.mark.parametrize("kind", [Mlp, Conv1DMlp])
def test_weights_are_quantized_where_they_are(
    devices: Devices, name: str, kind: type[nn.Module]
) -> None:
    model = kind(30).to(devices[1])
    before = copy.deepcopy(model)
    with launches() as log:
        report = qv.convert(model, RECIPES[name], weights="quantize")
    assert {launch.device for launch in log} == {devices[1]}
    custom = name == "custom"
    expected = {"fc1": TENSORS[name], "fc2": nn.Parameter if custom else TENSORS[name]}
    assert quantized_weights(model) == expected
    wanted = ["quantized", "kept" if custom else "quantized"]
    assert [layer.weights for layer in report.converted] == wanted
    for layer, old in ((model.fc1, before.fc1), (model.fc2, before.fc2)):
        assert layer.weight.shape == old.weight.shape
        assert layer.weight.requires_grad
        if isinstance(layer.weight, TENSORS[name]):
            assert isinstance(layer.weight, nn.Parameter)
            assert {part.device for part in parts(layer.weight).values()} == {devices[1]}
            assert 0 < error(layer.weight.dequantize(), old.weight) < BOUNDS[name]
    x = torch.randn(5, 30, device=devices[1])
    results, exact = step(model, x), step(before, x)
    for key in ("y", "dx"):
        assert error(results[key], exact[key]) < 5 * BOUNDS[name], key
    held = {layer.name: layer for layer in qv.status(model).layers}
    fc1 = sum(part.numel() * part.element_size() for part in parts(model.fc1.weight).values())
    assert held["fc1"].weight_bytes == fc1 + 60 * 4
    assert fc1 < 30 * 60 * 4


@every_recipe
@pytest.mark.parametrize("kind", [Mlp, Conv1DMlp])
def test_convert_back_dequantizes(devices: Devices, name: str, kind: type[nn.Module]) -> None:
    model = kind(30).to(devices[1])
    classes = [type(module) for module in model.modules()]
    qv.convert(model, RECIPES[name], weights="quantize")
    stored = model.fc1.weight.dequantize()
    qv.convert_back(model)
    assert [type(module) for module in model.modules()] == classes
    assert type(model.fc1.weight) is nn.Parameter
    assert model.fc1.weight.requires_grad
    assert equal(model.fc1.weight, stored)
    with launches() as log:
        assert model(torch.randn(5, 30, device=devices[1])).device == devices[1]
    assert log == []


@every_recipe
def test_an_optimizer_updates_quantized_weights(devices: Devices, name: str) -> None:
    model = Conv1DMlp().to(devices[1])
    qv.convert(model, RECIPES[name], weights="quantize")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x, target = torch.randn(32, 30, device=devices[1]), torch.randn(32, 30, device=devices[1])
    losses = []
    for _ in range(12):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    assert type(model.fc1.weight) is TENSORS[name]


@every_recipe
def test_a_saved_gpt2_with_quantized_weights(devices: Devices, name: str) -> None:
    model = tiny_gpt2()
    report = qv.convert(model, RECIPES[name], weights="quantize")
    assert len(report.converted) == 8
    model.to(devices[1])
    ids = tokens().to(devices[1])
    calibrate(model, ids)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin = tiny_gpt2()
    qv.convert(twin, RECIPES[name], weights="quantize")
    twin.load_state_dict(torch.load(buffer, weights_only=True, map_location="cpu"))
    twin.to(devices[1])
    with torch.no_grad():
        expected = model(ids).logits
        assert equal(twin(ids).logits, expected)
        assert equal(copy.deepcopy(model)(ids).logits, expected)


def transformed_input_only(role: Role) -> Quantizer:
    return qv.NVFP4Quantizer(hadamard=role.tensor == "input")


def test_a_product_with_one_transformed_operand_is_refused(devices: Devices) -> None:
    """Its values would be wrong: the transform cancels only where both operands have it."""
    layer = qv.Linear(32, 32, device=devices[1])
    x, grad = torch.randn(16, 32, device=devices[1]), torch.randn(16, 32)
    with pytest.raises(RecipeError, match="hadamard"):
        train_step(layer, x, grad, CustomRecipe(transformed_input_only))
