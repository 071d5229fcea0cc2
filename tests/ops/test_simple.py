"""Norms, dropout, scale, reshape, extra tensors and grouped linears as operations."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver import ops
from tests.integration.recipes import RECIPES
from tests.samples import DTYPES, normal


@pytest.mark.parametrize("centered", [False, True])
def test_the_norms_are_quavers(devices, centered: bool) -> None:
    for device in ("cpu", devices[1]):
        for ours, module in ((ops.LayerNorm, qv.LayerNorm), (ops.RMSNorm, qv.RMSNorm)):
            op = ours(16, 1e-3, device=device, zero_centered_gamma=centered)
            twin = module(16, 1e-3, device=device, zero_centered_gamma=centered)
            assert isinstance(op, module)
            assert isinstance(op, ops.FusibleOperation)
            x = normal(3, 16, device=device)
            assert torch.equal(op(x), twin(x))
            assert list(op.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_normalization(dtype) -> None:
    x = normal(2, 3, 16, dtype=dtype).requires_grad_()
    y = ops.L2Normalization(eps=0.5)(x)
    wide = x.detach().double().requires_grad_()
    exact = wide / (wide.square().sum(-1, keepdim=True) + 0.5).sqrt()
    assert y.dtype == dtype
    grad = normal(2, 3, 16, dtype=dtype, name="grad")
    y.backward(grad)
    exact.backward(grad.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=8 * eps, atol=8 * eps)
    assert repr(ops.L2Normalization()) == "L2Normalization(eps=1e-06)"
    with pytest.raises(qv.QuaverError, match="at least 0, not -1"):
        ops.L2Normalization(-1)
    with pytest.raises(qv.QuaverError, match="at least one dimension"):
        ops.L2Normalization()(torch.tensor(1.0))


def test_dropout_is_torchs(devices) -> None:
    op = ops.Dropout(0.25)
    x = torch.ones(40, 50, device=devices[1])
    kept = op(x).cpu() != 0
    assert 0.6 < kept.float().mean() < 0.9
    torch.manual_seed(3)
    first = ops.Sequential(ops.Identity(), op)(torch.ones(40, 50))
    torch.manual_seed(3)
    assert torch.equal(first, nn.Dropout(0.25)(torch.ones(40, 50)))
    assert torch.equal(op.eval()(x), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        ops.Dropout(1.5)


def test_scale_identity_and_reshape() -> None:
    x = normal(4, 6, dtype=torch.bfloat16)
    assert ops.Identity()(x) is x
    y = ops.ConstantScale(0.3)(x)
    assert y.dtype == x.dtype
    assert torch.equal(y, x * 0.3)
    assert ops.Reshape((2, -1, 3))(x).shape == (2, 4, 3)
    assert ops.Reshape([24])(x).shape == (24,)
    assert repr(ops.Reshape((2, -1))) == "Reshape(shape=(2, -1))"
    assert repr(ops.ConstantScale(2)) == "ConstantScale(scale=2)"
    for scale in (torch.ones(()), "2", True):
        with pytest.raises(qv.QuaverError, match="scale must be a number"):
            ops.ConstantScale(scale)
    for shape in ((-1, -1), (2.0, 3), "ab", (-2,)):
        with pytest.raises(qv.QuaverError, match="shape must be sizes"):
            ops.Reshape(shape)


def test_extra_tensors() -> None:
    x, r = normal(3, 4).requires_grad_(), normal(3, 4, name="r").requires_grad_()
    ops.AddExtraInput()(x, r).backward(normal(3, 4, name="grad"))
    assert torch.equal(x.grad, r.grad)
    buffer = torch.ones(3, 4)
    y = ops.AddExtraInput(in_place=True)(x, buffer)
    assert y is buffer
    assert torch.equal(buffer, x + 1)
    y, extra = ops.MakeExtraOutput()(x)
    assert y is x
    assert extra is x
    with pytest.raises(qv.QuaverError, match=r"shape \(3, 4\) of what it is added to, not \(4,\)"):
        ops.AddExtraInput()(x, torch.ones(4))
    assert repr(ops.AddExtraInput(in_place=True)) == "AddExtraInput(in_place=True)"


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_what_is_no_tensor_is_no_extra_input(recipe: str | None) -> None:
    model = ops.Sequential(ops.Linear(8, 4), ops.AddExtraInput())
    with qv.autocast(enabled=recipe is not None, recipe=RECIPES.get(recipe)):
        for given in (None, 3):
            with pytest.raises(qv.QuaverError, match=f"must be a tensor, not {given}"):
                model(normal(2, 8), given)
        with pytest.raises(qv.QuaverError, match=r"x must be a tensor, not None"):
            model(None, normal(2, 4))


def test_extra_tensors_on_another_device_or_of_another_shape(devices) -> None:
    model = ops.Sequential(ops.Linear(8, 4, device=devices[0]), ops.AddExtraInput())
    x = normal(3, 8, device=devices[0])
    with qv.autocast(recipe=RECIPES["current"]):
        with pytest.raises(qv.DeviceMismatchError, match=f"the extra input is on {devices[1]}"):
            model(x, normal(3, 4, device=devices[1]))
        with pytest.raises(qv.QuaverError, match=r"not \(4,\)"):
            model(x, normal(4, device=devices[0]))
    with pytest.raises(qv.DeviceMismatchError, match=f"the extra input is on {devices[1]}"):
        ops.AddExtraInput()(x, x.to(devices[1]))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_grouped_linear_takes_its_sizes_as_an_extra_input(devices, recipe: str | None) -> None:
    op = ops.GroupedLinear(3, 16, 8, device=devices[1])
    module = qv.GroupedLinear(3, 16, 8, device=devices[1])
    module.load_state_dict(op.state_dict())
    op.qualified_name = module.qualified_name = "grouped"
    model = ops.Sequential(ops.ReLU(), op, ops.ConstantScale(2.0))
    splits = torch.tensor([4, 0, 8])
    x, found = normal(12, 16, device=devices[1]), []
    chosen = None if recipe is None else RECIPES[recipe]
    for run in (lambda: model(x, splits), lambda: 2 * module(ops.ReLU()(x), splits.tolist())):
        with qv.autocast(enabled=recipe is not None, recipe=chosen):
            y = run()
        y.backward(normal(12, 8, device=devices[1], name="grad"))
        found.append(y)
    assert torch.equal(*found)
    for ours, theirs in zip(op.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
