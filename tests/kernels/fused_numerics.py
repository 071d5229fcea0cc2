"""Norms and activations in float64, and how far float32 arithmetic may be from them.

The bounds are sums of first-order rounding errors; U is float32's unit roundoff. Sums of n terms in
any order err by at most n U times the sum of magnitudes. Exponentials, divisions and roots are
given a few U each, since GPUs approximate them to 2 units in the last place; an exponential's
argument p, which has relative errors of its own, moves it by |p| times those.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

U = 2.0**-24
FLAT = 2.0**-120
"""What is so small, float32 rounds to its subnormal numbers, or some GPU operations to 0."""

LARGEST = 1e15
"""Squares of larger inputs may overflow in float32 and not in float64."""


class Bounded(NamedTuple):
    """What must come out, in float64, and by how much it may be missed."""

    value: torch.Tensor
    bound: torch.Tensor


def rounded_to(expected: Bounded, dtype: torch.dtype) -> Bounded:
    """The bound of a result in `dtype`, with half a unit in the last place for its rounding."""
    if dtype == torch.float32:
        return expected
    info = torch.finfo(dtype)
    reach = expected.value.abs() + expected.bound
    step = (reach * info.eps).clamp(min=info.smallest_normal * info.eps)
    return Bounded(expected.value, expected.bound + step / 2)


def assert_within(got: torch.Tensor, expected: Bounded) -> None:
    """Each value within its bound; NaN where NaN is expected."""
    expected = rounded_to(expected, got.dtype)
    value, bound = expected.value, expected.bound + FLAT
    wide = got.detach().cpu().double()
    assert wide.shape == value.shape
    held = value.to(got.dtype).double()  # a value beyond the dtype's range is inf
    fine = ((wide - value).abs() <= bound) | (wide == held) | (wide.isnan() & value.isnan())
    if not fine.all():
        worst = ((wide - value).abs() / bound)[~fine]
        raise AssertionError(f"{(~fine).sum()} values beyond their bounds, by {worst.max():.3g}")


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A sample as [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


# ---- norms


class NormCase(NamedTuple):
    """The arguments of a norm."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    zero_centered: bool
    rms: bool

    def to(self, device: torch.device) -> "NormCase":
        """The same on a device."""
        x, weight, bias = (None if t is None else t.to(device) for t in self[:3])
        assert x is not None
        return self._replace(x=x, weight=weight, bias=bias)


def plain_norm(case: NormCase) -> torch.Tensor:
    """The norm as torch has it, in the dtype of the case."""
    weight = case.weight
    if weight is not None and case.zero_centered:
        weight = 1.0 + weight
    width = case.x.shape[1:]
    if case.rms:
        return functional.rms_norm(case.x, width, weight, case.eps)
    return functional.layer_norm(case.x, width, weight, case.bias, case.eps)


def in_float64(case: NormCase) -> NormCase:
    """The case in float64, whose tensors want gradients."""
    wide = (None if t is None else t.detach().cpu().double().requires_grad_() for t in case[:3])
    x, weight, bias = wide
    assert x is not None
    return case._replace(x=x, weight=weight, bias=bias)


class _Errors(NamedTuple):
    """Of the normalized values n [M, K], of the mean times rstd and of rstd, relatively."""

    n: torch.Tensor
    e_n: torch.Tensor
    r: torch.Tensor
    e_r: torch.Tensor
    gain: torch.Tensor


def _errors(case: NormCase) -> _Errors:
    x, columns = case.x.detach(), case.x.shape[1]
    mean = torch.zeros_like(x[:, :1]) if case.rms else x.mean(1, keepdim=True)
    e_mean = 0.0 * mean if case.rms else (columns + 2) * U * x.abs().mean(1, keepdim=True)
    centered = x - mean
    r = (centered.square().mean(1, keepdim=True) + case.eps).rsqrt()
    # The mean's error adds its square to the variance, for the centered values sum to 0.
    e_r = (columns + 6) * U / 2 + (e_mean * r).square() / 2 + 6 * U
    n = centered * r
    e_n = e_mean * r + n.abs() * (e_r + 4 * U)
    gain = torch.ones_like(x[0]) if case.weight is None else case.weight.detach()
    return _Errors(n, e_n, r, e_r, 1.0 + gain if case.zero_centered else gain)


def expected_norm(case: NormCase) -> Bounded:
    """y."""
    wide = in_float64(case)
    y = plain_norm(wide).detach()
    n, e_n, _, _, gain = _errors(wide)
    bias = 0.0 if wide.bias is None else wide.bias.detach().abs()
    return Bounded(y, gain.abs() * (e_n + 3 * U * n.abs()) + U * (bias + 2 * y.abs()))


def expected_gradients(case: NormCase, grad: torch.Tensor) -> list[Bounded | None]:
    """dx, dweight and dbias; None where there is no such parameter."""
    wide, g = in_float64(case), grad.detach().cpu().double()
    inputs = [t for t in wide[:3] if t is not None]
    found = iter(torch.autograd.grad(plain_norm(wide), inputs, g))
    dx, dweight, dbias = (None if t is None else next(found) for t in wide[:3])
    n, e_n, r, e_r, gain = _errors(wide)
    rows, columns = wide.x.shape

    def mean(t: torch.Tensor) -> torch.Tensor:
        return t.mean(1, keepdim=True)

    gained = g * gain
    along, across = mean(gained * n), 0.0 * r if case.rms else mean(gained)
    e_along = (columns + 5) * U * mean((gained * n).abs()) + mean(gained.abs() * e_n)
    e_across = 0.0 * r if case.rms else (columns + 5) * U * mean(gained.abs())
    terms = gained.abs() + (n * along).abs() + across.abs()
    e_sum = n.abs() * e_along + e_n * along.abs() + e_across + 6 * U * terms
    assert dx is not None
    results: list[Bounded | None] = [Bounded(dx, r * e_sum + (e_r + 3 * U) * dx.abs())]
    if dweight is None:
        return [*results, None, None]
    e_dweight = (rows + 4) * U * (g * n).abs().sum(0) + (g.abs() * e_n).sum(0)
    results.append(Bounded(dweight, e_dweight))
    results.append(None if dbias is None else Bounded(dbias, (rows + 2) * U * g.abs().sum(0)))
    return results


# ---- activations


def plain_activation(x: torch.Tensor, name: str, limit: float, alpha: float) -> torch.Tensor:
    """The activation composed of torch's functions."""
    plain = {
        "gelu": lambda t: functional.gelu(t, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": functional.relu,
        "srelu": lambda t: functional.relu(t) ** 2,
        "silu": functional.silu,
    }
    if name in plain:
        return plain[name](x)
    gate, linear = x.chunk(2, -1)
    if name == "clamped_swiglu":
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (linear + 1)
    gates = {
        "geglu": "gelu",
        "glu": "sigmoid",
        "qgeglu": "qgelu",
        "reglu": "relu",
        "sreglu": "srelu",
        "swiglu": "silu",
    }
    return plain[gates[name]](gate) * linear


def _argument(gate: torch.Tensor, name: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The p of the sigmoid in the gate's nonlinearity, and its derivative; 0 if there is none."""
    one = torch.ones_like(gate)
    if name in ("gelu", "geglu"):
        root = 2.0 * (2.0 / torch.pi) ** 0.5
        gate = gate.clamp(-16, 16)
        return root * (gate + 0.044715 * gate**3), root * (1 + 3 * 0.044715 * gate**2)
    factors = {"qgelu": 1.702, "qgeglu": 1.702, "clamped_swiglu": alpha}
    if name in ("relu", "reglu", "srelu", "sreglu"):
        return 0.0 * one, 0.0 * one
    return gate * factors.get(name, 1.0), one * factors.get(name, 1.0)


def _split(x: torch.Tensor, name: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate, and the magnitude of what multiplies it."""
    if not name.endswith("glu"):
        return x, torch.ones_like(x)
    gate, linear = x.chunk(2, -1)
    if name == "clamped_swiglu":
        return gate.clamp(max=limit), (linear.clamp(-limit, limit) + 1).abs()
    return gate, linear.abs()


def expected_activation(x: torch.Tensor, name: str, limit: float, alpha: float) -> Bounded:
    """y: its relative error is that of the sigmoid, 10 U |p| + 16 U, and of the products."""
    wide = x.detach().cpu().double()
    y = plain_activation(wide, name, limit, alpha)
    gate, linear = _split(wide, name, limit)
    p, _ = _argument(gate, name, alpha)
    flat = (FLAT + _own(name)) * (gate.abs() + 1) * linear
    bound = (10 * p.abs() + 24) * U * y.abs() + flat
    return Bounded(y, bound.nan_to_num(nan=0.0, posinf=torch.inf))


def expected_slope(
    grad: torch.Tensor, x: torch.Tensor, name: str, limit: float, alpha: float
) -> Bounded:
    """dx. The sigmoid s errs by e_s = (10 |p| + 16) U s (1 - s) + 2 U s, and so does 1 - s."""
    wide, g = x.detach().cpu().double().requires_grad_(), grad.detach().cpu().double()
    y = plain_activation(wide, name, limit, alpha)
    dx = torch.autograd.grad(y, wide, g)[0]
    wide = wide.detach()
    gate, linear = _split(wide, name, limit)
    p, factor = _argument(gate, name, alpha)
    s = torch.sigmoid(p)
    e_s = (10 * p.abs() + 16) * U * s * (1 - s) + 2 * U * s
    z = gate.clamp(-16, 16) if name in ("gelu", "geglu") else gate
    if name == "glu":
        e_slope = e_s * (1 - s) + s * (e_s + U) + 2 * U * s
    else:
        curve = (z * factor).abs()
        relative = (10 * p.abs() + 24) * U
        e_slope = e_s + curve * s * (e_s + U) + curve * s * (1 - s) * relative
    dx_gate, *dx_linear = dx.chunk(2, -1) if name.endswith("glu") else (dx,)
    bounds = [g.abs() * linear * (e_slope + FLAT + _own(name)) + 6 * U * dx_gate.abs()]
    for half in dx_linear:
        flat = (FLAT + _own(name)) * g.abs() * (gate.abs() + 1)
        bounds.append((10 * p.abs() + 24) * U * half.abs() + flat)
    return Bounded(dx, torch.cat(bounds, -1).nan_to_num(nan=0.0, posinf=torch.inf))


def _own(name: str) -> float:
    """What float64 misses itself, where torch's GELU takes tanh near -1 from 1."""
    return 2.0**-40 if name in ("gelu", "geglu") else 0.0
