"""Odd shapes and special values with every recipe."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.testing import launches
from tests.integration.helpers import equal, linear_like, train_step
from tests.integration.recipes import BOUNDS, RECIPES, error
from tests.integration.test_edge_values import assert_alike, with_row

Devices = list[torch.device]

every_recipe = pytest.mark.parametrize("name", RECIPES)

OTHERS = [0, 1, 3, 4]
"""The rows beside the one that `with_row` makes special."""

ROW_BY_ROW = ("block", "mxfp8")
"""Recipes in whose forward no row has to do with another."""


@every_recipe
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 0), (2, 3), ()], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(30, 17), (16, 32), (1, 1), (129, 33)])
def test_any_shape(
    devices: Devices, name: str, shape: tuple[int, ...], in_features: int, out_features: int
) -> None:
    plain = nn.Linear(in_features, out_features)
    layers = [linear_like(plain, device) for device in ("cpu", devices[1])]
    x, grad = torch.randn(*shape, in_features), torch.randn(*shape, out_features)
    results = []
    for layer in layers:
        with launches() as log:
            results.append(train_step(layer, x.to(layer.weight.device), grad, RECIPES[name]))
        assert {launch.device for launch in log} == {layer.weight.device}
    assert_alike(*results, device=devices[1])
    result = results[0]
    assert result["y"].shape == (*shape, out_features)
    assert result["dx"].shape == x.shape
    assert result["weight"].shape == plain.weight.shape
    if x.numel() == 0:
        assert not result["weight"].any()
        assert not result["bias"].any()
    elif in_features > 1:
        rows, g = x.reshape(-1, in_features), grad.reshape(-1, out_features)
        assert error(result["y"], plain(x)) < 3 * BOUNDS[name]
        assert error(result["dx"], grad @ plain.weight) < 3 * BOUNDS[name]
        assert error(result["weight"], g.t() @ rows) < 3 * BOUNDS[name]


@every_recipe
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 4), (4, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_features(devices: Devices, name: str, inputs: int, outputs: int) -> None:
    layer = qv.Linear(inputs, outputs, device=devices[1])
    results = train_step(
        layer, torch.randn(3, inputs, device=devices[1]), torch.randn(3, outputs), RECIPES[name]
    )
    assert equal(results["y"], layer.bias.expand(3, outputs))
    assert results["dx"].shape == (3, inputs)
    assert not results["dx"].any()


@every_recipe
@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "offset"])
def test_non_contiguous_input(devices: Devices, name: str, view: str) -> None:
    base = torch.randn(40, 64, device=devices[1])
    x = {
        "transposed": base[:30, :8].t(),
        "strided": base[:8, :60:2],
        "expanded": base[:1, :30].expand(8, 30),
        "offset": base[3:11, 5:35],
    }[view]
    layer = qv.Linear(30, 17, device=devices[1])
    twin = linear_like(layer, devices[1])
    grad = torch.randn(17, 8).t()
    results = train_step(layer, x, grad, RECIPES[name])
    expected = train_step(twin, x.contiguous(), grad.contiguous(), RECIPES[name])
    for key in ("y", "dx", "weight"):
        assert equal(results[key], expected[key]), key


@every_recipe
def test_an_all_zero_input_gives_the_bias_and_zero_gradients(devices: Devices, name: str) -> None:
    layer = qv.Linear(32, 48, device=devices[1])
    x = torch.zeros(4, 32, device=devices[1])
    results = train_step(layer, x, torch.zeros(4, 48), RECIPES[name])
    assert equal(results["y"], layer.bias.expand(4, 48))
    assert not results["dx"].any()
    assert not results["weight"].any()
    with torch.no_grad():
        layer.weight.zero_()
    with qv.autocast(recipe=RECIPES[name]):
        assert equal(layer(torch.randn(4, 32, device=devices[1])), layer.bias.expand(4, 48))


@every_recipe
def test_zero_rows_stay_zero(devices: Devices, name: str) -> None:
    layer = qv.Linear(16, 8, bias=False, device=devices[1])
    grad = torch.randn(5, 8)
    grad[2] = 0
    results = train_step(layer, with_row(0.0, devices[1]), grad, RECIPES[name])
    assert not results["y"][2].any()
    assert not results["dx"][2].any()
    assert results["y"][OTHERS].abs().amax(1).min() > 0


@every_recipe
def test_nan_stays_in_its_row_and_is_not_masked(devices: Devices, name: str) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    twin = linear_like(layer, devices[1])
    bad = with_row(torch.nan, devices[1])
    good = bad.clone()
    good[2] = 0
    grad = torch.randn(5, 8)
    results = train_step(layer, bad, grad, RECIPES[name])
    expected = train_step(twin, good, grad, RECIPES[name])
    assert results["y"][2].isnan().all()
    assert equal(results["y"][OTHERS], expected["y"][OTHERS])  # NaN never enters an amax
    assert equal(results["dx"], expected["dx"])
    assert results["weight"].isnan().all()
    assert equal(results["bias"], expected["bias"])


@every_recipe
def test_nan_in_a_gradient_stays_in_its_row(devices: Devices, name: str) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    grad = torch.randn(5, 8)
    grad[2] = torch.nan
    results = train_step(layer, torch.randn(5, 16, device=devices[1]), grad, RECIPES[name])
    assert results["dx"][2].isnan().all()
    assert results["dx"][OTHERS].isfinite().all()
    assert results["bias"].isnan().all()


@every_recipe
def test_nan_in_the_weight_reaches_the_output(devices: Devices, name: str) -> None:
    layer = qv.Linear(32, 40, device=devices[1])
    with torch.no_grad():
        layer.weight[3, 5] = torch.nan
    with qv.autocast(recipe=RECIPES[name]):
        y = layer(torch.randn(5, 32, device=devices[1]))
    assert y[:, 3].isnan().all()
    # FP4 has no NaN: there the scale of its block of 16×16 is one
    first = 16 if name == "nvfp4" else 4
    assert y[:, first:].isfinite().all()


@every_recipe
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_inf_saturates(devices: Devices, name: str, value: float) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    x = with_row(1.0, devices[1])
    x[2, 5] = value
    with qv.autocast(recipe=RECIPES[name]):
        y = layer(x)
        rows = [layer(row[None])[0] for row in x]
    assert y[OTHERS].isfinite().all()
    # MXFP8's largest scale is 2^127, and 448 of it is more than float32 holds
    assert y[2].isfinite().all() == (name != "mxfp8")
    signs = (y[2] - layer.bias).sign() == (layer.weight[:, 5] * value).sign()
    assert signs.float().mean() >= 0.5  # it was not dropped: its sign decides
    if name in ROW_BY_ROW:
        for i in OTHERS:
            assert torch.allclose(y[i], rows[i], rtol=1e-5, atol=1e-6)
            exact = nn.functional.linear(x[i], layer.weight, layer.bias)
            assert error(y[i], exact) < 3 * BOUNDS[name]


@every_recipe
def test_values_that_are_far_apart(devices: Devices, name: str) -> None:
    layer = qv.Linear(32, 8, device=devices[1])
    x = torch.randn(5, 32, device=devices[1])
    x[0], x[2] = 1e-40, 3e38
    results = train_step(layer, x, torch.randn(5, 8), RECIPES[name])
    assert results["dx"].isfinite().all()
    for row in (1e-42, 1e-38):
        tiny = torch.full((2, 32), row, device=devices[1])
        small = train_step(layer, tiny, torch.full((2, 8), row), RECIPES[name])
        for key, value in small.items():
            assert value.isfinite().all(), (row, key)


@every_recipe
@pytest.mark.parametrize("width", [15, 17])
def test_a_wrong_width_is_one_clear_line(devices: Devices, name: str, width: int) -> None:
    layer = qv.Linear(16, 8, device=devices[1])
    with (
        launches() as log,
        qv.autocast(recipe=RECIPES[name]),
        pytest.raises(ValueError, match="x must have 16 features") as caught,
    ):
        layer(torch.zeros(4, width, device=devices[1]))
    assert "\n" not in str(caught.value)
    assert log == []
