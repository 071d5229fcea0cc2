"""The activations with autograd: values, gradients and second derivatives."""

import pytest
import torch

from quaver.errors import QuaverError
from quaver.functional import activation
from quaver.kernels import activation as kernel
from quaver.kernels import activation_backward
from quaver.kernels.activation.names import GATED, PLAIN
from quaver.testing import launches
from tests.samples import DTYPES, normal

every_name = pytest.mark.parametrize("name", [*PLAIN, *GATED])


@every_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_the_kernels(devices, name, dtype) -> None:
    x = normal(2, 3, 8, dtype=dtype, device=devices[1]) * 3
    shape = (2, 3, 4 if name in GATED else 8)
    with torch.no_grad():
        alone = activation(x, name)
    x.requires_grad_()
    grad = normal(*shape, dtype=dtype, device=devices[1], name="grad")
    with launches() as log:
        y = activation(x, name)
        y.backward(grad)
    assert [(entry.kernel, entry.current) for entry in log] == [
        ("activation", devices[1]),
        ("activation_backward", devices[1]),
    ]
    flat = x.detach().view(6, 8)
    assert torch.equal(y, alone)
    assert torch.equal(y, kernel(flat, name, dtype).view(shape))
    assert torch.equal(x.grad.view(6, 8), activation_backward(grad.view(6, -1), flat, name))


@pytest.mark.parametrize("name", ["gelu", "srelu", "swiglu", "clamped_swiglu"])
def test_second_derivatives(name) -> None:
    x = (normal(3, 6, dtype=torch.float32) * 2).requires_grad_()

    def slope(x):
        return torch.autograd.grad(activation(x, name).sum(), x, create_graph=True)[0]

    (second,) = torch.autograd.grad(slope(x).sum(), x)
    step = 1e-2
    numeric = torch.zeros_like(x)
    for i in range(6):
        moved = torch.zeros_like(x)
        moved[:, i] = step
        ends = [slope(x + sign * moved).detach().sum(1) for sign in (1, -1)]
        numeric[:, i] = (ends[0] - ends[1]) / (2 * step)
    if name != "srelu":  # which is not smooth at 0
        torch.testing.assert_close(second, numeric, rtol=2e-2, atol=2e-2)
    assert second.abs().max() > 0


def test_errors() -> None:
    with pytest.raises(QuaverError, match="activation must be one of"):
        activation(torch.ones(2, 2), "tanh")
    with pytest.raises(QuaverError, match="must be even"):
        activation(torch.ones(2, 3), "swiglu")
