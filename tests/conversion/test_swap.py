"""The swap itself: nothing but the class changes, and the way back is exact."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import quaver as qv
from quaver.conversion import ConversionError, convert, convert_back
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import Mlp


def attributes(model: nn.Module) -> dict[str, list[str]]:
    return {name: list(module.__dict__) for name, module in model.named_modules()}


def test_classes_are_swapped_in_place_and_everything_else_stays():
    model = Mlp().eval()
    model.fc2.train()
    model.fc1.bias.requires_grad_(False)
    model.fc2.to(torch.bfloat16)
    before = dict(model.named_parameters())
    modules = dict(model.named_modules())
    report = convert(model)
    assert type(model.fc1) is qv.nn.Linear
    assert isinstance(model.fc1, nn.Linear)
    assert dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert not model.fc1.training
    assert model.fc2.training
    assert not model.fc1.bias.requires_grad
    assert model.fc2.weight.dtype == torch.bfloat16
    assert model.fc1.qualified_name == "fc1"
    layer = report.converted[0]
    assert (layer.name, layer.class_before, layer.class_after) == (
        "fc1", "torch Linear", "quaver Linear",
    )  # fmt: skip
    assert (layer.device, layer.recipe, layer.weights) == (torch.device("cpu"), None, "kept")
    assert "inside quaver.autocast only" in str(report)


def test_without_a_recipe_fp8_runs_inside_autocast_only():
    model = Mlp()
    x = torch.randn(4, 16)
    expected = model(x)
    convert(model)
    with launches() as log:
        assert torch.equal(model(x), expected)
    assert log == []
    with launches() as log, qv.autocast():
        out = model(x)
    assert log != []
    assert not torch.equal(out, expected)
    assert torch.allclose(out, expected, atol=0.1)


def test_the_weight_scale_is_set_from_the_weight():
    model = Mlp()
    with torch.no_grad():
        model.fc1.weight.clamp_(-0.125, 0.125)[0, 0] = 0.25
    convert(model, DelayedScaling())
    assert model.fc1.recipe_states["forward"].scale[1].item() == 448 / 0.25


def test_convert_back_is_exact():
    model = Mlp()
    twin = copy.deepcopy(model)
    keys = attributes(model)
    parameters = dict(model.named_parameters())
    x = torch.randn(4, 16)
    expected = model(x)
    convert(model, DelayedScaling(), exclude=())
    assert not torch.equal(model(x), expected)
    report = convert_back(model)
    assert [layer.name for layer in report.converted] == ["fc1", "fc2", "lm_head"]
    assert {layer.weights for layer in report.converted} == {"kept"}
    assert type(model.fc1) is nn.Linear
    assert attributes(model) == keys
    assert list(model.state_dict()) == list(twin.state_dict())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    with launches() as log:
        assert torch.equal(model(x), expected)
    assert log == []
    assert convert_back(model).converted == ()


def test_hooks_stay_and_run_once():
    model = Mlp()
    calls = []
    model.fc1.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    model.fc1.register_forward_hook(lambda module, args, out: calls.append("post"))
    model.fc1.register_full_backward_hook(lambda module, gi, go: calls.append("backward"))
    convert(model, DelayedScaling())
    x = torch.randn(4, 16, requires_grad=True)
    model(x).sum().backward()
    assert calls == ["pre", "post", "backward"]
    convert_back(model)
    model(x).sum().backward()
    assert calls == ["pre", "post", "backward"] * 2


def test_an_optimizer_made_before_keeps_training():
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert(model, DelayedScaling())
    x, target = torch.randn(16, 16), torch.randint(64, (16,))
    before = model.fc1.weight.detach().clone()
    losses = []
    with launches() as log:
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(model.fc1.weight, before)
    assert {launch.kernel for launch in log} >= {"cast", "scaled_mm", "scale_update"}


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "a": nn.Linear(4, 8, bias=False)})
    model["a"].weight = model["embedding"].weight
    convert(model)
    assert model["a"].weight is model["embedding"].weight
    assert isinstance(model["a"], qv.nn.Linear)


class Doubled(nn.Linear):
    """A subclass with a method of its own, whose forward differs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)

    def fan_out(self) -> int:
        return self.out_features


def test_subclasses_are_left_unless_asked_for():
    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 8))
    report = convert(model)
    assert [layer.name for layer in report.converted] == ["0"]
    assert "include_subclasses=True" in report.skipped[0].reason
    assert type(model[1]) is Doubled


def test_a_subclass_that_was_asked_for_is_still_one_and_goes_back():
    model = nn.Sequential(Doubled(4, 8))
    x = torch.randn(3, 4)
    expected = model(x)
    convert(model, DelayedScaling(), include_subclasses=True)
    layer = model[0]
    assert isinstance(layer, Doubled)
    assert isinstance(layer, qv.nn.Linear)
    assert type(layer).__name__ == "Doubled"
    assert layer.fan_out() == 8
    assert torch.allclose(model(x), expected / 2, atol=0.2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(layer)
        assert torch.equal(twin(x), model(x))
    convert_back(model)
    assert type(layer) is Doubled
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.LazyLinear(4), "no weight yet"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "no parameter of its own"),
    ],
)
def test_layers_without_a_plain_weight_are_left_with_the_reason(layer, reason):
    report = convert(nn.Sequential(layer()), include_subclasses=True)
    assert report.converted == ()
    assert reason in report.skipped[0].reason


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_another_tools_quantization_are_left(dtype):
    model = Mlp()
    weight = model.fc1.weight.detach().to(dtype)
    model.fc1.weight = nn.Parameter(weight, requires_grad=False)
    reasons = {layer.name: layer.reason for layer in convert(model).skipped}
    assert reasons["fc1"] == f"its weight is {dtype}, which is not high precision"
    assert type(model.fc1) is nn.Linear


def test_a_layer_whose_forward_is_replaced_on_the_instance_is_left():
    model = Mlp()
    model.fc2.forward = lambda x: x
    reasons = {layer.name: layer.reason for layer in convert(model).skipped}
    assert "its forward is replaced on the instance" in reasons["fc2"]


def test_a_bound_forward_on_the_instance_follows_the_class():
    model = Mlp()
    model.fc1.forward = model.fc1.forward  # what accelerate leaves when its hooks are removed
    x = torch.randn(4, 16)
    expected = model(x)
    convert(model, DelayedScaling(), include="fc1")
    with launches() as log:
        model(x)
    assert log != []
    convert_back(model)
    assert model.fc1.forward.__func__ is nn.Linear.forward
    assert torch.equal(model(x), expected)


def test_quavers_own_layers_get_the_recipe_and_keep_it_only_until_convert_back():
    mine = DelayedScaling(margin=2)
    model = nn.Sequential(qv.nn.Linear(4, 4, recipe=mine), nn.Linear(4, 4))
    keys = attributes(model)
    convert(model, DelayedScaling())
    assert model[0].recipe == DelayedScaling()
    convert_back(model)
    assert type(model[0]) is qv.nn.Linear
    assert model[0].recipe == mine
    assert attributes(model) == keys


def test_a_layer_whose_class_was_changed_since_is_not_converted_back():
    model = Mlp()
    convert(model, DelayedScaling())
    parametrize.register_parametrization(model.fc2, "weight", nn.Identity())
    with pytest.raises(ConversionError, match="fc2 must still be a quaver Linear"):
        convert_back(model)
    assert type(model.fc1) is qv.nn.Linear
    parametrize.remove_parametrizations(model.fc2, "weight")
    convert_back(model)
    assert type(model.fc1) is type(model.fc2) is nn.Linear


def test_a_single_layer_is_converted_itself():
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    expected = layer(x)
    report = convert(layer, DelayedScaling())
    assert [entry.name for entry in report.converted] == [""]
    assert "(the model itself)" in str(report)
    assert type(layer) is qv.nn.Linear
    with launches() as log:
        layer(x)
    assert log != []
    convert_back(layer)
    assert torch.equal(layer(x), expected)


def test_weights_without_values_are_converted_and_loaded_later():
    with torch.device("meta"):
        model = Mlp()
    report = convert(model, DelayedScaling())
    assert "its scale comes from its first use" in report.converted[0].note
    source = Mlp()
    model.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(4, 16)
    assert torch.allclose(model(x), source(x), atol=0.1)
    with pytest.raises(
        ConversionError, match=r"fc1\.weight, but it is offloaded or not loaded yet"
    ):
        convert(torch.nn.Module.to_empty(Mlp(), device="meta"), weights="quantize")


def test_a_failure_half_way_leaves_nothing_converted(monkeypatch):
    model = Mlp()
    keys, x = attributes(model), torch.randn(4, 16)
    expected = model(x)
    original = qv.nn.Linear.set_weight_scale

    def fail_at_fc2(self):
        if self.qualified_name == "fc2":
            raise RuntimeError("out of memory")
        original(self)

    monkeypatch.setattr(qv.nn.Linear, "set_weight_scale", fail_at_fc2)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert(model, DelayedScaling())
    assert type(model.fc1) is type(model.fc2) is nn.Linear
    assert attributes(model) == keys
    assert torch.equal(model(x), expected)
