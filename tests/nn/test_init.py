"""quantized_model_init, and weights that are quantized later."""

import copy
import pickle

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling, Format
from quaver.testing import launches
from tests.samples import normal
from tests.tensors.make import same_payload

RECIPE = DelayedScaling(amax_history_len=4)


def drawn(seed: int = 2, device="cpu", dtype=torch.float32) -> nn.Linear:
    """What torch draws."""
    torch.manual_seed(seed)
    return nn.Linear(30, 12, device=device, dtype=dtype)


def quantized(seed: int = 2, device="cpu", dtype=torch.float32, **options) -> qv.Linear:
    torch.manual_seed(seed)
    with qv.quantized_model_init(**options):
        return qv.Linear(30, 12, device=device, dtype=dtype)


@pytest.mark.parametrize("current", [0, 1])
def test_weights_are_quantized_on_their_own_device(devices, current: int) -> None:
    with torch.accelerator.device_index(current), launches() as log:
        ours = quantized(device=devices[1])
        assert torch.accelerator.current_device_index() == current
    assert [(e.kernel, e.device, e.current) for e in log] == [("current_cast", *devices[1:] * 2)]
    weight = ours.weight
    assert isinstance(weight, qv.Float8Tensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.device == weight.rowwise_data.device == weight.rowwise_scale_inv.device
    assert weight.device == devices[1]
    expected = drawn(device=devices[1]).weight.detach()
    scale = torch.tensor(448.0) / expected.abs().max().cpu()
    assert weight.rowwise_scale_inv.item() == (1 / scale).item()
    error = (weight.dequantize() - expected).abs().max()
    assert 0 < error <= expected.abs().max() / 28
    assert not isinstance(ours.bias, qv.Float8Tensor)
    assert torch.equal(ours.bias, drawn(device=devices[1]).bias)


def test_forward_and_backward_on_a_device_that_is_not_current(devices) -> None:
    ours, x = quantized(device=devices[1]), normal(5, 30, device=devices[1])
    reference = drawn()
    with launches() as log, qv.autocast(recipe=RECIPE):
        y = ours(x)
        y.square().sum().backward()
    assert {(entry.device, entry.current) for entry in log} == {(devices[1], devices[1])}
    casts = [entry.kernel for entry in log if entry.kernel.startswith("cast")]
    assert casts == ["cast", "cast_grad"], "input and gradient, no weight"
    exact = reference(x.cpu())
    exact.square().sum().backward()
    assert (y.cpu() - exact).norm() < 0.05 * exact.norm()
    assert ours.weight.grad.device == devices[1]
    difference = (ours.weight.grad.cpu() - reference.weight.grad).norm()
    assert difference < 0.1 * reference.weight.grad.norm()


def test_without_a_recipe_in_force_it_multiplies_with_the_dequantized_weight() -> None:
    ours, x = quantized(), normal(5, 30)
    expected = nn.functional.linear(x, ours.weight.dequantize(), ours.bias)
    assert torch.equal(ours(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_value_before_can_be_kept_on_the_cpu(devices, dtype) -> None:
    ours = quantized(device=devices[1], dtype=dtype, preserve_high_precision_init_val=True)
    value = ours.weight.get_high_precision_init_val()
    assert value.device.type == "cpu"
    assert value.dtype == dtype
    assert torch.equal(value, drawn(device=devices[1], dtype=dtype).weight.detach().cpu())
    ours.weight.clear_high_precision_init_val()
    assert ours.weight.get_high_precision_init_val() is None
    ours.weight.clear_high_precision_init_val()
    assert quantized().weight.get_high_precision_init_val() is None


def test_the_value_before_stays_with_a_copy_of_the_module() -> None:
    ours = quantized(preserve_high_precision_init_val=True)
    twin = copy.deepcopy(ours)
    expected = ours.weight.get_high_precision_init_val()
    assert torch.equal(twin.weight.get_high_precision_init_val(), expected)
    ours.weight.clear_high_precision_init_val()
    assert twin.weight.get_high_precision_init_val() is not None


def test_the_innermost_counts_and_a_disabled_one_means_high_precision() -> None:
    with qv.quantized_model_init():
        with qv.quantized_model_init(enabled=False):
            inner = qv.Linear(4, 4)
        outer = qv.Linear(4, 4)
    assert not isinstance(inner.weight, qv.Float8Tensor)
    assert isinstance(outer.weight, qv.Float8Tensor)
    assert not isinstance(qv.Linear(4, 4).weight, qv.Float8Tensor)
    with pytest.raises(KeyError), qv.quantized_model_init():
        raise KeyError
    assert not isinstance(qv.Linear(4, 4).weight, qv.Float8Tensor)


def test_torchs_modules_are_left_alone() -> None:
    with qv.quantized_model_init():
        assert type(nn.Linear(4, 4).weight) is nn.Parameter


def test_the_recipe_names_the_format() -> None:
    ours = quantized(recipe=DelayedScaling(fp8_format=Format.E4M3))
    assert ours.weight.fp8_dtype == torch.float8_e4m3fn


def test_on_meta_then_to_empty_then_reset(devices) -> None:
    ours = quantized(device="meta", preserve_high_precision_init_val=True)
    assert isinstance(ours.weight, qv.Float8Tensor)
    assert ours.weight.device.type == "meta"
    ours.to_empty(device=devices[1])
    torch.manual_seed(2)
    ours.reset_parameters()
    expected = quantized(device=devices[1])
    assert ours.weight.device == devices[1]
    assert same_payload(ours.weight, expected.weight)
    assert torch.equal(ours.bias, expected.bias)
    assert ours.weight.get_high_precision_init_val() is not None


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_twin_of_the_module(devices, twin_of) -> None:
    ours = quantized(device=devices[1])
    twin = twin_of(ours)
    assert isinstance(twin.weight, nn.Parameter)
    assert isinstance(twin.weight, qv.Float8Tensor)
    assert twin.weight.device == devices[1]
    assert same_payload(twin.weight, ours.weight)
    x = normal(5, 30, device=devices[1])
    with qv.autocast(recipe=RECIPE):
        assert torch.equal(twin(x), ours(x))


def test_state_dicts_load_from_quantized_and_from_high_precision(devices) -> None:
    ours, other = quantized(2, device=devices[0]), quantized(3, device=devices[1])
    other.load_state_dict(ours.state_dict())
    assert same_payload(other.weight, ours.weight)
    assert other.weight.device == devices[1]
    plain = drawn(4)
    other.load_state_dict(plain.state_dict(), strict=True)
    assert same_payload(other.weight, quantized(4).weight)


@pytest.mark.parametrize(
    ("optimizer", "rate"), [(torch.optim.SGD, 2.0), (torch.optim.AdamW, 0.02)], ids=["SGD", "AdamW"]
)
def test_it_trains(optimizer, rate: float) -> None:
    ours, x = quantized(), normal(64, 30)
    target = drawn(9)(x).detach()
    steps = optimizer(ours.parameters(), lr=rate)
    losses = []
    for _ in range(30):
        with qv.autocast(recipe=RECIPE):
            loss = (ours(x) - target).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert isinstance(ours.weight, qv.Float8Tensor)
    assert losses[-1] < 0.8 * losses[0]


def test_a_weight_is_quantized_and_dequantized_later_where_it_is(devices) -> None:
    torch.manual_seed(2)
    ours = qv.Linear(30, 12, device=devices[1])
    ours.weight.requires_grad_(False)
    ours.quantize_weight()
    assert same_payload(ours.weight, quantized(device=devices[1]).weight)
    assert not ours.weight.requires_grad
    weight = ours.weight
    ours.quantize_weight()
    assert ours.weight is weight
    ours.dequantize_weight()
    assert type(ours.weight) is nn.Parameter
    assert not ours.weight.requires_grad
    assert ours.weight.device == devices[1]
    assert torch.equal(ours.weight, weight.dequantize())


def test_a_weights_scale_can_be_set_before_its_first_use(devices) -> None:
    torch.manual_seed(2)
    ours = qv.Linear(30, 12, device=devices[1], recipe=RECIPE)
    ours.set_weight_scale()
    state = ours.recipe_states["forward"]
    expected = torch.tensor(448.0) / ours.weight.detach().abs().max().cpu()
    assert state.device == devices[1]
    assert state.scale.cpu()[1].item() == expected.item()
    assert state.ready.tolist() == [0.0, 0.0, 0.0], "not for good: the weight may be loaded yet"
    meta = qv.Linear(30, 12, device="meta")
    meta.set_weight_scale()
    assert meta.recipe_states == {}
