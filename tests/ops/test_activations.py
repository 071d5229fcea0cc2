"""The activations as operations."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import quaver as qv
from quaver import ops
from tests.samples import DTYPES, normal


def _halves(function):
    return lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _quick(x):
    return x * torch.sigmoid(1.702 * x)


def _clamped(x):
    z, c = x.chunk(2, -1)
    z = z.clamp(max=0.6)
    return z * torch.sigmoid(1.2 * z) * (1 + c.clamp(-0.6, 0.6))


TWINS = {
    "GELU": _gelu,
    "GEGLU": _halves(_gelu),
    "GLU": _halves(torch.sigmoid),
    "QGELU": _quick,
    "QGEGLU": _halves(_quick),
    "ReLU": F.relu,
    "ReGLU": _halves(F.relu),
    "SReLU": lambda x: F.relu(x).square(),
    "SReGLU": _halves(lambda x: F.relu(x).square()),
    "SiLU": F.silu,
    "SwiGLU": _halves(F.silu),
    "ClampedSwiGLU": _clamped,
}


def make(name: str) -> ops.FusibleOperation:
    return ops.ClampedSwiGLU(0.6, 1.2) if name == "ClampedSwiGLU" else getattr(ops, name)()


@pytest.mark.parametrize("name", TWINS)
def test_it_equals_torchs_composition_with_its_gradient(devices, name: str) -> None:
    operation = make(name)
    assert list(operation.state_dict()) == []
    for device in ("cpu", devices[1]):
        x = normal(2, 3, 16, device=device).requires_grad_()
        twin = normal(2, 3, 16).requires_grad_()
        y, expected = operation(x), TWINS[name](twin)
        grad = normal(*expected.shape, name="grad")
        y.backward(grad.to(device))
        expected.backward(grad)
        assert y.device == x.device == x.grad.device
        torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(x.grad.cpu(), twin.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_is_the_inputs(dtype) -> None:
    x = normal(3, 8, dtype=dtype)
    y = ops.SwiGLU()(x)
    assert y.dtype == dtype
    exact = TWINS["SwiGLU"](x.double())
    torch.testing.assert_close(y.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_options_that_are_not_there_are_refused() -> None:
    assert ops.GELU("tanh")(normal(3)).shape == (3,)
    with pytest.raises(qv.QuaverError, match=r'approximate="tanh", not \'none\'; torch.nn.GELU'):
        ops.GELU("none")
    with pytest.raises(qv.QuaverError, match="the backward needs x"):
        ops.ReLU(inplace=True)
    with pytest.raises(qv.QuaverError, match="the backward needs x"):
        ops.SiLU(inplace=True)
    with pytest.raises(qv.QuaverError, match="limit must be above 0, not -1"):
        ops.ClampedSwiGLU(limit=-1)
    assert repr(ops.ClampedSwiGLU()) == "ClampedSwiGLU(limit=7.0, alpha=1.702)"


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(qv.QuaverError, match="must be even, not 5"):
        ops.SwiGLU()(normal(3, 5))
    with pytest.raises(qv.QuaverError, match=r"not torch\.float64"):
        ops.GELU()(normal(3, 4).double())
    with pytest.raises(qv.QuaverError, match="not a scalar"):
        ops.GELU()(torch.tensor(1.0))


def test_a_quantized_input_is_read_in_high_precision() -> None:
    x = qv.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(normal(3, 8))
    assert torch.equal(ops.GELU()(x), ops.GELU()(x.dequantize()))
    assert torch.equal(ops.L2Normalization()(x), ops.L2Normalization()(x.dequantize()))
