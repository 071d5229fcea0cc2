"""Odd shapes and special values, alike on every device and as without padding."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_same, equal, linear_like, scaling, train_step

RECIPE = DelayedScaling(amax_history_len=3)

Devices = list[torch.device]


def within_e4m3(y: torch.Tensor, x: torch.Tensor, layer: nn.Linear) -> bool:
    """Whether y is x W^T + b within what two roundings to E4M3 may do to each product."""
    exact = nn.functional.linear(x, layer.weight, layer.bias).detach()
    products = nn.functional.linear(x.abs(), layer.weight.abs()).detach()
    return bool(((y - exact).abs() <= ((1 + 2**-4) ** 2 - 1) * products + 1e-4).all())


def assert_alike(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], device: torch.device
) -> None:
    """The CPU's results and those of `device`: the same bits, but for a GPU's order of sums."""
    if device.type == "sim":
        assert_same(left, right)
        return
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.allclose(value, right[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 0), (2, 3), ()], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(30, 17), (16, 32), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_any_shape(
    devices: Devices, shape: tuple[int, ...], in_features: int, out_features: int, bias: bool
) -> None:
    plain = nn.Linear(in_features, out_features, bias=bias)
    layers = [linear_like(plain, device) for device in ("cpu", devices[1])]
    for step in range(2):
        x, grad = torch.randn(*shape, in_features), torch.randn(*shape, out_features)
        results = []
        for layer in layers:
            with launches() as log:
                results.append(train_step(layer, x.to(layer.weight.device), grad, RECIPE))
            assert {launch.device for launch in log} == {layer.weight.device}
        assert_alike(*results, device=devices[1])
        assert_same(*(scaling(layer) for layer in layers))
        y, dx = results[0]["y"], results[0]["dx"]
        assert y.shape == (*shape, out_features)
        assert dx.shape == x.shape
        assert results[0]["weight"].shape == plain.weight.shape
        if step == 0:  # later scales are of other inputs, which may have been smaller
            assert within_e4m3(y, x, plain)
        if x.numel() == 0:
            assert not results[0]["weight"].any()


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "offset"])
def test_non_contiguous_input(devices: Devices, view: str) -> None:
    base = torch.randn(40, 64, device=devices[1])
    x = {
        "transposed": base[:30, :8].t(),
        "strided": base[:8, :60:2],
        "expanded": base[:1, :30].expand(8, 30),
        "offset": base[3:11, 5:35],
    }[view]
    assert not x.is_contiguous()
    layer = qv.Linear(30, 17, device=devices[1])
    twin = linear_like(layer, devices[1])
    grad = torch.randn(17, 8).t()
    assert not grad.is_contiguous()
    results = train_step(layer, x, grad, RECIPE)
    expected = train_step(twin, x.contiguous(), grad.contiguous(), RECIPE)
    # the bias' gradient is a sum of torch's, whose order depends on the strides
    assert torch.allclose(results.pop("bias"), expected.pop("bias"), rtol=1e-6, atol=1e-6)
    assert_same(results, expected)
    assert_same(scaling(layer), scaling(twin))


def test_tokens_do_not_change_each_other(devices: Devices) -> None:
    """What padding would do: a row's output must not depend on how many others there are."""
    layer = qv.Linear(30, 17, device=devices[1])
    train_step(layer, torch.randn(8, 30, device=devices[1]), torch.randn(8, 17), RECIPE)
    x = torch.randn(8, 30, device=devices[1])
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        whole = layer(x)
        for rows in (1, 3, 5):
            assert torch.allclose(layer(x[:rows]), whole[:rows], rtol=1e-6, atol=1e-6)


def test_an_all_zero_input_gives_the_bias_and_zero_gradients(devices: Devices) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    x = torch.zeros(4, 16, device=devices[1])
    results = train_step(layer, x, torch.zeros(4, 8), RECIPE)
    assert equal(results["y"], layer.bias.expand(4, 8))
    assert not results["dx"].any()
    assert not results["weight"].any()
    state = layer.recipe_states["forward"]
    assert state.scale[0].item() == 1.0
    assert state.scale.isfinite().all()


def with_row(value: float, device: torch.device) -> torch.Tensor:
    x = torch.randn(5, 16, device=device)
    x[2] = value
    return x


@pytest.mark.parametrize("known_scale", [False, True])
def test_zero_rows_stay_zero(devices: Devices, known_scale: bool) -> None:
    layer = qv.Linear(16, 8, bias=False, device=devices[1])
    if known_scale:
        train_step(layer, torch.randn(4, 16, device=devices[1]), torch.randn(4, 8), RECIPE)
    grad = torch.randn(5, 8)
    grad[2] = 0
    results = train_step(layer, with_row(0.0, devices[1]), grad, RECIPE)
    assert not results["y"][2].any()
    assert not results["dx"][2].any()
    assert results["y"][[0, 1, 3, 4]].abs().amax(1).min() > 0


@pytest.mark.parametrize("known_scale", [False, True])
def test_nan_stays_in_its_row_and_is_not_masked(devices: Devices, known_scale: bool) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    twin = linear_like(layer, devices[1])
    if known_scale:
        x = torch.randn(4, 16, device=devices[1])
        for each in (layer, twin):
            train_step(each, x, torch.ones(4, 8), RECIPE)
    bad = with_row(torch.nan, devices[1])
    good = bad.clone()
    good[2] = 0
    grad = torch.randn(5, 8)
    results, expected = (train_step(m, x, grad, RECIPE) for m, x in ((layer, bad), (twin, good)))
    others = [0, 1, 3, 4]
    assert results["y"][2].isnan().all()
    assert equal(results["y"][others], expected["y"][others])
    assert equal(results["dx"], expected["dx"])  # x takes no part in its own gradient
    assert results["weight"].isnan().all()  # it does in the weight's
    assert results["bias"].isfinite().all()
    assert_same(scaling(layer), scaling(twin))  # NaN never enters an amax


def test_nan_in_a_gradient_stays_in_its_row(devices: Devices) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    grad = torch.randn(5, 8)
    grad[2] = torch.nan
    results = train_step(layer, torch.randn(5, 16, device=devices[1]), grad, RECIPE)
    assert results["dx"][2].isnan().all()
    assert results["dx"][[0, 1, 3, 4]].isfinite().all()
    assert results["bias"].isnan().all()
    assert layer.recipe_states["backward"].scale.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_inf_saturates(devices: Devices, value: float) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    x = torch.full((4, 16), 2.0, device=devices[1])
    train_step(layer, x, torch.ones(4, 8), RECIPE)  # from now on 2 is the largest that fits
    bad = with_row(1.0, devices[1])
    bad[2, 5] = value
    clipped = bad.clamp(-2, 2)
    twin = linear_like(layer, devices[1])
    twin.set_extra_state(layer.get_extra_state())
    results = train_step(layer, bad, torch.ones(5, 8), RECIPE)
    expected = train_step(twin, clipped, torch.ones(5, 8), RECIPE)
    assert_same(results, expected)
    assert results["y"].isfinite().all()
    assert layer.recipe_states["forward"].amax_history[-1, 0].item() == torch.inf
    assert layer.recipe_states["forward"].scale[0].item() == 448 / 2


def test_values_that_are_far_apart(devices: Devices) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    x = with_row(3e38, devices[1])
    x[0] = 1e-40
    results = train_step(layer, x, torch.ones(5, 8), RECIPE)
    assert results["dx"].isfinite().all()
    assert layer.recipe_states["forward"].scale.isfinite().all()
    assert (layer.recipe_states["forward"].scale > 0).all()
    train_step(layer, x, torch.ones(5, 8), RECIPE)
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        assert equal(layer(x[:1]), layer.bias.expand(1, 8))  # far below the smallest step


@pytest.mark.parametrize("shape", [(4, 15), (4, 17), ()], ids=str)
def test_a_wrong_width_is_one_clear_line(devices: Devices, shape: tuple[int, ...]) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    with (
        launches() as log,
        qv.autocast(recipe=RECIPE),
        pytest.raises(ValueError, match="x must have 16 features") as caught,
    ):
        layer(torch.zeros(shape, device=devices[1]))
    assert "\n" not in str(caught.value)
    assert log == []
