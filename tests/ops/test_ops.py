"""The fusible operations one by one."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver import ops
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.samples import DTYPES, normal

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_basic_linear_in_high_precision_is_a_product(dtype) -> None:
    op, x = ops.BasicLinear(30, 12, dtype=dtype), normal(5, 30, dtype=dtype)
    assert torch.equal(op(x), nn.functional.linear(x, op.weight))
    assert list(op.state_dict()) == ["weight", "_extra_state"]
    assert op.bias is None
    assert repr(op) == "BasicLinear(in_features=30, out_features=12)"


def test_it_draws_the_weight_that_torch_draws() -> None:
    torch.manual_seed(5)
    op = ops.BasicLinear(30, 12)
    torch.manual_seed(5)
    assert torch.equal(op.weight, nn.Linear(30, 12, bias=False).weight)


def test_basic_linear_in_fp8_equals_linear_without_a_bias() -> None:
    op, module = ops.BasicLinear(30, 12), qv.Linear(30, 12, bias=False)
    module.load_state_dict(op.state_dict())
    results = []
    for each in (op, module):
        x = normal(5, 30).requires_grad_()
        with qv.autocast(recipe=RECIPE), launches() as log:
            y = each(x)
            y.square().sum().backward()
        assert [entry.kernel for entry in log].count("scaled_mm") == 3
        results.append((y, x.grad, each.weight.grad, each.recipe_states["forward"].scale))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_basic_linear_on_a_device_that_is_not_current(devices) -> None:
    op = ops.BasicLinear(30, 12, device=devices[1], recipe=RECIPE)
    x = normal(5, 30, device=devices[1]).requires_grad_()
    with launches() as log:
        y = op(x)
        y.sum().backward()
    assert len(log) >= 5
    assert {(entry.device, entry.current) for entry in log} == {(devices[1], devices[1])}
    assert {t.device for t in (y, x.grad, op.weight.grad)} == {devices[1]}
    assert {s.device for s in op.recipe_states.values()} == {devices[1]}
    assert torch.accelerator.current_device_index() == 0


def test_quantized_init_and_reset(devices) -> None:
    torch.manual_seed(1)
    with qv.quantized_model_init():
        op = ops.BasicLinear(30, 12, device="meta")
    op.to_empty(device=devices[1]).reset_parameters()
    assert isinstance(op.weight, qv.Float8Tensor)
    assert op.weight.device == devices[1]
    assert op.weight.dequantize().abs().max().item() == pytest.approx(30**-0.5, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_adds_in_the_inputs_dtype(dtype) -> None:
    op, x = ops.Bias(12), normal(2, 3, 12, dtype=dtype)
    assert op.bias.tolist() == [0.0] * 12
    nn.init.normal_(op.bias)
    y = op(x)
    assert y.dtype == dtype
    assert torch.equal(y, x + op.bias.to(dtype))
    assert repr(op) == "Bias(size=12)"
    y.sum().backward()
    assert op.bias.grad.dtype == torch.float32
    assert op.bias.grad.tolist() == [6.0] * 12


@pytest.mark.parametrize("size", [1, 8])
def test_a_bias_of_another_size_is_an_error_also_behind_a_linear(size: int) -> None:
    model = ops.Sequential(ops.BasicLinear(16, 12), ops.Bias(size))
    with qv.autocast(recipe=RECIPE), pytest.raises(qv.QuaverError, match=r"not to shape \(3, 12\)"):
        model(normal(3, 16))


def test_bias_on_two_devices_is_an_error_that_names_both(devices) -> None:
    op = ops.Bias(4, device=devices[0])
    with pytest.raises(
        qv.DeviceMismatchError, match=f"x is on {devices[1]} and bias is on {devices[0]}"
    ):
        op(torch.zeros(2, 4, device=devices[1]))


def test_linear_is_quavers_as_an_operation() -> None:
    op = ops.Linear(30, 12, recipe=RECIPE)
    assert isinstance(op, qv.Linear)
    assert isinstance(op, ops.FusibleOperation)
    with launches() as log:
        assert op(normal(5, 30)).shape == (5, 12)
    assert "scaled_mm" in [entry.kernel for entry in log]


def test_operations_pass_on_one_tensor() -> None:
    for kind in (ops.Linear, ops.GroupedLinear, ops.BasicLinear):
        with pytest.raises(TypeError, match="return_bias"):
            kind(3, 30, 12, return_bias=True)
    op = ops.Linear(30, 12, init_method=nn.init.ones_)
    assert op.weight.eq(1).all()
    assert op.bias.eq(0).all()
