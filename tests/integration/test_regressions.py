"""Promises about values that were broken once: each named after the promise, with its values."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

import quaver as qv
from quaver import ops
from quaver.conversion import ConversionReport
from quaver.recipe import DelayedScaling, Format
from quaver.scaling import DelayedScalingState
from quaver.testing import launches
from tests.samples import normal

RECIPE = DelayedScaling(amax_history_len=4)
HYBRID, E4M3 = (
    DelayedScaling(amax_history_len=4, fp8_format=fmt) for fmt in (Format.HYBRID, Format.E4M3)
)

uncalibrated = pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the Euclidean norm; FP8 leaves about 0.03."""
    return ((got - expected).norm() / expected.norm()).item()


def state(module: nn.Module, mode: str = "forward") -> DelayedScalingState:
    found = module.recipe_states[mode]
    assert isinstance(found, DelayedScalingState)
    return found


def products(run: Callable[[], object]) -> int:
    """How many quantized products `run` launches."""
    with launches() as log:
        run()
    return [launch.kernel for launch in log].count("scaled_mm")


# ---- a weight that is replaced after the conversion


def drawn(factor: float = 30.0) -> nn.Linear:
    """torch's layer, the weight `factor` times as large as torch draws it."""
    source = nn.Linear(32, 32)
    with torch.no_grad():
        source.weight.mul_(factor)
    return source


def assign(layer: nn.Module, source: nn.Linear) -> None:
    layer.load_state_dict(source.state_dict(), assign=True)


def set_data(layer: nn.Module, source: nn.Linear) -> None:
    layer.weight.data = source.weight.data.clone()
    layer.bias.data = source.bias.data.clone()


def copy_into(layer: nn.Module, source: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(source.weight)
        layer.bias.copy_(source.bias)


REPLACEMENTS = {
    "load": lambda layer, source: layer.load_state_dict(source.state_dict()),
    "assign": assign,
    "copy": copy_into,
    "data": set_data,
}
WRAPPED = ("load", "assign", "copy")


@uncalibrated
@pytest.mark.parametrize(
    ("how", "weights"),
    [*((how, "keep") for how in REPLACEMENTS), *((how, "quantize") for how in WRAPPED)],
)
def test_whoever_converts_then_loads_then_infers_gets_right_values(how: str, weights: str) -> None:
    source, model = drawn(), nn.Sequential(nn.Linear(32, 32))
    qv.convert(model, RECIPE, weights=weights)
    REPLACEMENTS[how](model[0], source)
    x = normal(8, 32)
    with torch.no_grad():
        assert products(lambda: model(x)) == 1
        assert error(model(x), source(x)) < 0.05


@uncalibrated
@pytest.mark.parametrize(
    ("how", "trained"), [("reset", False), ("reset", True), ("init", False)], ids=str
)
def test_parameters_drawn_anew_are_cast_with_their_own_scale(how: str, trained: bool) -> None:
    """Another initialization, as transformers' `_init_weights` runs it before the training."""
    model, x = nn.Sequential(drawn(1 / 30)), normal(8, 32)
    qv.convert(model, RECIPE)
    if trained:
        model(x)
    if how == "reset":
        model[0].reset_parameters()
    else:
        nn.init.normal_(model[0].weight, std=10)
    with torch.no_grad():
        expected = linear(x, model[0].weight, model[0].bias)
        assert error(model(x), expected) < 0.05


@uncalibrated
def test_a_plain_checkpoint_loaded_into_a_trained_model_brings_its_own_scale() -> None:
    source, model = drawn(), nn.Sequential(nn.Linear(32, 32))
    qv.convert(model, RECIPE)
    x = normal(8, 32)
    for _ in range(3):
        model(x)
    before = state(model[0]).scale.clone()
    model.load_state_dict({f"0.{k}": v for k, v in source.state_dict().items()})
    with torch.no_grad():
        assert error(model(x), source(x)) < 0.05
    assert state(model[0]).scale[0] == before[0], "the input's scale is still known"
    model(x)
    assert state(model[0]).scale[1].item() == pytest.approx(
        448 / source.weight.abs().max().item(), rel=1e-6
    )


def test_our_own_checkpoint_brings_the_scales_that_it_was_saved_with() -> None:
    first = qv.Linear(32, 32, recipe=RECIPE)
    x = normal(8, 32)
    first(x * 3)
    second = qv.Linear(32, 32, recipe=RECIPE)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        assert torch.equal(second(x), first(x))
    assert torch.equal(state(second).scale, state(first).scale)
    assert state(second).scale[0].item() == (torch.tensor(448.0) / (3 * x.abs().max())).item()


# ---- another recipe midway


def train(layer: qv.Linear, recipe: DelayedScaling, x: torch.Tensor, grad: torch.Tensor):
    """Output and input gradient of one step."""
    x = x.detach().requires_grad_()
    with qv.autocast(recipe=recipe):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize("steps", [1, 3])
def test_another_format_takes_effect_at_once_and_clips_no_gradient(steps: int) -> None:
    layer, x, grad = qv.Linear(32, 32), normal(16, 32), normal(16, 32, name="grad")
    for recipe in (HYBRID, E4M3, HYBRID, E4M3):
        for _ in range(steps):
            y, dx = train(layer, recipe, x, grad)
            assert error(y, linear(x, layer.weight, layer.bias)) < 0.05
            assert error(dx, grad @ layer.weight) < 0.1
        limit = 57344.0 if recipe is HYBRID else 448.0
        assert state(layer, "backward").scale[0].item() == pytest.approx(
            limit / grad.abs().max().item(), rel=1e-6
        )


@pytest.mark.parametrize(("margin", "bound"), [(0, (0.3, 1.0)), (3, (0.0, 0.05))])
def test_another_margin_takes_effect_in_inference_too(margin: int, bound) -> None:
    """A tensor 8 times as large as any before is clipped, unless the margin leaves it room."""
    layer, x = qv.Linear(32, 32), normal(16, 32)
    for _ in range(2):
        train(layer, RECIPE, x, torch.ones(16, 32))
    before = state(layer).scale.clone()
    recipe = DelayedScaling(amax_history_len=4, margin=margin)
    with torch.no_grad(), qv.autocast(recipe=recipe):
        y = layer(8 * x)
    assert bound[0] < error(y, linear(8 * x, layer.weight, layer.bias)) < bound[1]
    assert state(layer).scale[:2].tolist() == (before[:2] / 2**margin).tolist()


def test_a_pending_backward_is_not_clipped_by_a_region_in_between() -> None:
    layer, x, grad = qv.Linear(32, 32), normal(16, 32), normal(16, 32, name="grad")
    for _ in range(2):
        train(layer, HYBRID, x, grad)
    leaf = x.clone().requires_grad_()
    with qv.autocast(recipe=HYBRID):
        y = layer(leaf)
    with torch.no_grad(), qv.autocast(recipe=E4M3):
        layer(x)
    y.backward(grad)
    assert error(leaf.grad, grad @ layer.weight) < 0.1


# ---- gradients


NETS = {
    "tanh": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)),
    "relu": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
    "linear": lambda: nn.Sequential(nn.Linear(16, 1)),
}


@pytest.mark.parametrize("which", NETS)
def test_a_gradient_penalty_is_refused_rather_than_dropped(which: str) -> None:
    net, x = NETS[which](), normal(8, 16).requires_grad_()
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    qv.convert(net, RECIPE, exclude=())
    y = net(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert error(first.detach(), expected) < 0.3  # FP8 may put a value on the other side of 0
    with pytest.raises(RuntimeError, match="no second derivative"):
        (y.mean() + first.pow(2).sum()).backward()


def by_init() -> nn.Module:
    with qv.quantized_model_init():
        return qv.Linear(16, 16)


def by_convert(made: nn.Module) -> nn.Module:
    model = nn.Sequential(made)
    qv.convert(model, weights="quantize")
    return model[0]


def an_operation() -> nn.Module:
    operation = ops.BasicLinear(16, 16)
    operation.quantize_weight()
    return operation


QUANTIZED = {
    "init": by_init,
    "convert": lambda: by_convert(nn.Linear(16, 16)),
    "conv1d": lambda: by_convert(Conv1D(16, 16)),
    "operation": an_operation,
}


@pytest.mark.parametrize("region", ["none", "disabled"])
@pytest.mark.parametrize("which", QUANTIZED)
def test_a_quantized_weight_gets_its_gradient_outside_of_fp8_too(which: str, region: str) -> None:
    layer = QUANTIZED[which]()
    x, grad = normal(4, 16), normal(4, 16, name="grad")
    leaf = x.clone().requires_grad_()
    if region == "none":
        y = layer(leaf)
    else:
        with qv.autocast(enabled=False):
            y = layer(leaf)
    y.backward(grad)
    turned = which == "conv1d"
    weight = layer.weight.dequantize()
    torch.testing.assert_close(layer.weight.grad, x.t() @ grad if turned else grad.t() @ x)
    torch.testing.assert_close(leaf.grad, grad @ (weight.t() if turned else weight))
    assert isinstance(layer.weight, qv.Float8Tensor)


# ---- layers without a recipe


def with_a_rule(model: nn.Module) -> ConversionReport:
    return qv.convert(model, rules=[qv.Rule("0", recipe=RECIPE)])


def in_two_conversions(model: nn.Module) -> ConversionReport:
    qv.convert(model)
    return qv.convert(model, RECIPE, exclude=("1",))


def made_by_hand(model: nn.Module) -> ConversionReport:
    torch.manual_seed(0)
    model[1] = qv.Linear(16, 16)
    return qv.convert(model, RECIPE, exclude=("1",))


@uncalibrated
@pytest.mark.parametrize("how", [with_a_rule, in_two_conversions, made_by_hand])
def test_a_layer_without_a_recipe_runs_in_fp8_inside_autocast_only(how) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    how(model)
    assert (model[0].recipe, model[1].recipe) == (RECIPE, None)
    x = normal(4, 16)
    with torch.no_grad():
        inside = []
        model[0].register_forward_hook(lambda module, args, y: inside.append(y))
        assert products(lambda: inside.append(model(x))) == 1
        assert torch.equal(inside[1], linear(inside[0], model[1].weight, model[1].bias))
        assert error(inside[1], model[1](linear(x, model[0].weight, model[0].bias))) < 0.05
        with qv.autocast():
            assert products(lambda: model(x)) == 2


def test_a_converted_layer_takes_its_input_by_torchs_name() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(input=x)

    model, x = Parent(), normal(4, 16)
    expected = model(x)
    qv.convert(model, RECIPE)
    assert products(lambda: model(x)) == 1
    assert 0 < error(model(x), expected) < 0.05


# ---- what users pass


WRONG_AMAXES = {
    "scalar": lambda history: history.max(),
    "one": lambda history: history.amax().reshape(1),
    "column": lambda history: history.amax(0)[:, None],
    "history": lambda history: history,
    "short": lambda history: history.amax(0)[:2],
    "number": lambda history: 1.0,
    "none": lambda history: None,
}


@pytest.mark.parametrize("which", WRONG_AMAXES)
def test_a_faulty_amax_function_is_named_and_writes_nothing(which: str) -> None:
    layer, x = qv.Linear(8, 8), normal(4, 8)
    for step in (1, 2):
        with qv.autocast(recipe=RECIPE):
            layer(x * step)
    mine = state(layer)
    scale, past = mine.scale.clone(), mine.amax_history[1:].clone()
    faulty = DelayedScaling(amax_history_len=4, amax_compute_algo=WRONG_AMAXES[which])
    named = pytest.raises(qv.RecipeError, match=r"amax_compute_algo must return .* shape \(3,\)")
    with named as caught, qv.autocast(recipe=faulty):
        layer(x)
    assert "\n" not in str(caught.value)
    assert torch.equal(mine.scale, scale)
    assert torch.equal(mine.amax_history[1:], past)
    assert mine.updates == 2
    with qv.autocast(recipe=RECIPE):
        layer(x)
    assert mine.updates == 3
    assert mine.scale[0].item() == (torch.tensor(448.0) / (2 * x.abs().max())).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
def test_an_amax_function_sees_a_copy_and_may_return_any_float(dtype) -> None:
    def last(history: torch.Tensor) -> torch.Tensor:
        found = history[0].to(dtype, copy=True)
        history.zero_()
        return found

    layer, x = qv.Linear(8, 8), torch.full((4, 8), 2.0)
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=last)
    for step in (1, 2):
        with qv.autocast(recipe=recipe):
            layer(x * step)
    assert state(layer).scale[0].item() == 448 / 4
    assert state(layer).amax_history[:, 0].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_scale_is_not_taken_over(value: float) -> None:
    layer, x = qv.Linear(8, 8), normal(4, 8)
    with qv.autocast(recipe=RECIPE):
        layer(x)
    before = state(layer).scale.clone()
    recipe = DelayedScaling(
        amax_history_len=4,
        scaling_factor_compute_algo=lambda amax, scale, limit, recipe: scale * 0 + value,
    )
    for _ in range(2):
        with qv.autocast(recipe=recipe):
            y = layer(4 * x)
    assert torch.equal(state(layer).scale, before)
    assert y.isfinite().all()
    twin = qv.Linear(8, 8)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(state(twin).scale, before)


@pytest.mark.parametrize("margin", [-100, -30, 30, 100])
def test_margins_at_their_ends_give_finite_values(margin: int) -> None:
    layer, x = qv.Linear(8, 8, bias=False), normal(4, 8)
    for _ in range(2):
        y, dx = train(layer, DelayedScaling(margin=margin), x, torch.ones(4, 8))
        assert y.isfinite().all()
        assert dx.isfinite().all()
    amax = x.abs().max().double().item()
    assert state(layer).scale[0].item() == pytest.approx(448 * 2.0**-margin / amax, rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.complex64], ids=str
)
@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "fp8"])
def test_an_input_that_is_not_high_precision_is_said_by_its_dtype(dtype, recipe) -> None:
    layer = qv.Linear(8, 8, recipe=recipe)
    with pytest.raises(TypeError, match=f"high-precision floating-point dtype, not {dtype}"):
        layer(torch.zeros(2, 8).to(dtype))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_can_be_asked_for_on_meta(device: str) -> None:
    """As accelerate does many times, also after a forward that counts shapes."""
    model = nn.Sequential(nn.Linear(8, 8)).to(device)
    qv.convert(model, RECIPE)
    model(torch.zeros(2, 8, device=device))
    found = copy.deepcopy(model).to("meta").state_dict()
    assert list(found) == ["0.weight", "0.bias", "0._extra_state"]
    assert found["0.weight"].device.type == "meta"
    assert not found["0._extra_state"].any()
    twin = qv.Linear(8, 8)
    twin.load_state_dict({"_extra_state": found["0._extra_state"]}, strict=False)
    assert twin.recipe_states == {}
