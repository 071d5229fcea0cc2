"""LayerNorm and RMSNorm: torch's twins within float32's rounding, wherever they live."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.errors import DeviceMismatchError, QuaverError
from quaver.testing import launches
from tests.kernels.fused_numerics import (
    NormCase,
    assert_within,
    expected_gradients,
    expected_norm,
    plain_norm,
)
from tests.samples import normal

LAYER: list[dict[str, Any]] = [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-2}]
RMS: list[dict[str, Any]] = [{}, {"elementwise_affine": False}, {"eps": 1e-2}]
PAIRS = [(qv.LayerNorm, nn.LayerNorm, options) for options in LAYER]
PAIRS += [(qv.RMSNorm, nn.RMSNorm, options) for options in RMS]

pairs = pytest.mark.parametrize(("ours", "twin", "options"), PAIRS)
classes = pytest.mark.parametrize("ours", [qv.LayerNorm, qv.RMSNorm])


def filled(module: nn.Module) -> nn.Module:
    """The module with parameters that are no ones and zeros."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(normal(*parameter.shape, name=name))
    return module


def case_of(module: Any, x: torch.Tensor) -> NormCase:
    """What the module computes for x."""
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    bias, rms = getattr(module, "bias", None), isinstance(module, nn.RMSNorm)
    flat = x.reshape(-1, x.shape[-1])
    return NormCase(flat, module.weight, bias, eps, module.zero_centered_gamma, rms)


def check(module: Any, x: torch.Tensor) -> None:
    """Output and gradients within their bounds of float64."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    case, columns = case_of(module, x), x.shape[-1]
    assert y.shape == x.shape
    assert_within(y.reshape(-1, columns), expected_norm(case))
    grad = normal(*x.shape, name="grad", dtype=y.dtype, device=x.device)
    y.backward(grad)
    dx, dweight, dbias = expected_gradients(case, grad.reshape(-1, columns))
    assert x.grad is not None
    assert dx is not None
    assert x.grad.dtype == x.dtype
    assert_within(x.grad.reshape(-1, columns), dx)
    for parameter, expected in ((module.weight, dweight), (getattr(module, "bias", None), dbias)):
        if parameter is not None:
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.device == x.device
            assert_within(parameter.grad, expected)


@pairs
def test_the_twin_s_values_gradients_and_checkpoints(ours, twin, options) -> None:
    theirs = filled(twin(30, **options))
    mine = ours(30, **options)
    assert isinstance(mine, twin)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    x = normal(3, 5, 30)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        mine(x.bfloat16()), theirs.bfloat16()(x.bfloat16()), rtol=2e-2, atol=2e-2
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(mine, x.to(dtype))
    check(mine, normal(30))
    check(mine, normal(8, 30)[::2])


@pairs
def test_a_new_module_equals_a_new_twin(ours, twin, options) -> None:
    mine, theirs = ours(6, **options), twin(6, **options)
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value)
    assert repr(mine) == repr(theirs)
    assert ours((6,)).normalized_shape == (6,)


@classes
def test_a_zero_centered_gain_begins_at_zero(ours) -> None:
    module = ours(30, zero_centered_gamma=True)
    assert torch.equal(module.weight, torch.zeros(30))
    assert "zero_centered_gamma=True" in repr(module)
    x = normal(4, 30)
    assert torch.equal(module(x), ours(30)(x))
    check(filled(module), x)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.zeros(30))
    with pytest.raises(QuaverError, match="zero_centered_gamma=True needs a weight"):
        ours(30, elementwise_affine=False, zero_centered_gamma=True)


@classes
def test_what_it_does_not_take_is_refused(ours) -> None:
    with pytest.raises(QuaverError, match="one size, that of the last dimension"):
        ours((3, 4))
    module = ours(4)
    with pytest.raises(QuaverError, match=r"weight must have shape \(5,\)"):
        module(normal(2, 5))
    with pytest.raises(QuaverError, match=r"not torch\.float64"):
        module(normal(2, 4).double())
    with pytest.raises(QuaverError, match="at least one dimension"):
        module(torch.tensor(1.0))


@classes
def test_parameters_keep_a_dtype_of_their_own(ours) -> None:
    check(filled(ours(12, dtype=torch.bfloat16)), normal(4, 12))
    check(filled(ours(12)), normal(4, 12, dtype=torch.bfloat16))


@classes
def test_no_tokens(ours) -> None:
    module, x = ours(8), torch.zeros(0, 8, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, torch.zeros(8))
    assert x.grad is not None
    assert x.grad.shape == (0, 8)


@classes
def test_only_what_wants_a_gradient_gets_one(ours) -> None:
    module = ours(8)
    module.weight.requires_grad_(False)
    x = normal(2, 8).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None
    with torch.no_grad():
        assert not module(x).requires_grad


@pairs
def test_second_derivatives_are_the_twin_s(ours, twin, options) -> None:
    found = []
    for module in (filled(ours(6, **options)), filled(twin(6, **options))):
        x = normal(3, 6).requires_grad_()
        gradients = torch.autograd.grad(
            (module(x) ** 3).sum(), [x, *module.parameters()], create_graph=True
        )
        sum(g.square().sum() for g in gradients).backward()
        found.append([x.grad, *(p.grad for p in module.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # the twin's
@pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_twin_s_dtype(ours, twin, options, dtype, devices) -> None:
    for device in (torch.device("cpu"), devices[1]):
        x = normal(3, 6, dtype=dtype, device=device).requires_grad_()
        mine, theirs = ours(6, device=device, **options), twin(6, device=device, **options)
        with torch.autocast(device.type, dtype=torch.float16):
            y, expected = mine(x), theirs(x)
        assert y.dtype == expected.dtype
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


@classes
def test_on_another_device_than_the_current(ours, devices) -> None:
    module = filled(ours(12, device=devices[1]))
    assert module.weight.device == devices[1]
    with launches() as log:
        check(module, normal(5, 12, device=devices[1]))
    assert {entry.kernel for entry in log} == {"norm", "norm_backward"}
    assert all(entry.device == entry.current == devices[1] for entry in log)
    with pytest.raises(DeviceMismatchError, match="weight"):
        module(normal(5, 12, device=devices[0]))
    module.to(devices[0])
    check(module, normal(5, 12, device=devices[0]))


@classes
def test_meta_devices_and_copies(ours) -> None:
    module = ours(12, device="meta", zero_centered_gamma=True)
    assert module(torch.empty(3, 12, device="meta")).shape == (3, 12)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    x = normal(2, 12)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@classes
@pytest.mark.parametrize("centered", [False, True])
def test_it_compiles_without_a_break(ours, centered: bool) -> None:
    module = filled(ours(12, zero_centered_gamma=centered))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        module.zero_grad()
        x = normal(4, 12, dtype=torch.bfloat16).requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad.clone() for p in module.parameters())])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_a_plain_norm_of_the_case_is_torch_s() -> None:
    """What the bounds are measured from."""
    x, weight, bias = normal(3, 6), normal(6, name="w"), normal(6, name="b")
    expected = nn.functional.layer_norm(x, (6,), weight, bias, 1e-3)
    assert torch.equal(plain_norm(NormCase(x, weight, bias, 1e-3, False, False)), expected)
