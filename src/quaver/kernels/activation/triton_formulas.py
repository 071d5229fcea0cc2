"""The nonlinearities of `formulas` and their derivatives inside Triton kernels.

Constants stand on the right: on the left Triton's interpreter takes the product for a constant.
"""

import triton
import triton.language as tl

from quaver.kernels.activation import formulas

_CUBIC = tl.constexpr(formulas.CUBIC)
_TWO_ROOT = tl.constexpr(formulas.TWO_ROOT)
_QUICK = tl.constexpr(formulas.QUICK)
_GELU_FLAT = tl.constexpr(formulas.GELU_FLAT)


@triton.jit
def _held(x, limit):
    """X within +-limit; NaN stays."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _argument(x, alpha, KIND: tl.constexpr):
    """The p in x * sigmoid(p)."""
    if KIND == "gelu":
        return (x + x * x * x * _CUBIC) * _TWO_ROOT
    elif KIND == "qgelu":
        return x * _QUICK
    elif KIND == "clamped_silu":
        return x * alpha
    else:
        return x


@triton.jit
def value(x, limit, alpha, KIND: tl.constexpr):
    """F(x) for the nonlinearity KIND."""
    if KIND == "sigmoid":
        return _sigmoid(x)
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif KIND == "srelu":
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif KIND == "clamped_silu":
        z = tl.where(x > limit, limit, x)
        return z * _sigmoid(_argument(z, alpha, KIND))
    else:
        return x * _sigmoid(_argument(x, alpha, KIND))


@triton.jit
def slope(x, limit, alpha, KIND: tl.constexpr):
    """F'(x) for the nonlinearity KIND."""
    if KIND == "sigmoid":
        s = _sigmoid(x)
        return s * (1.0 - s)
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "srelu":
        return 2.0 * tl.where(x <= 0.0, 0.0, x)
    elif KIND == "gelu":
        z = _held(x, _GELU_FLAT)
        s = _sigmoid(_argument(z, alpha, KIND))
        return s + z * s * (1.0 - s) * ((z * z * (3.0 * _CUBIC) + 1.0) * _TWO_ROOT)
    elif KIND == "qgelu":
        s = _sigmoid(_argument(x, alpha, KIND))
        return s + x * s * (1.0 - s) * _QUICK
    elif KIND == "clamped_silu":
        s = _sigmoid(_argument(x, alpha, KIND))
        return tl.where(x > limit, 0.0, s + x * s * (1.0 - s) * alpha)
    else:
        s = _sigmoid(x)
        return s + x * s * (1.0 - s)


@triton.jit
def linear_part(x, limit, KIND: tl.constexpr):
    """What multiplies the gate."""
    if KIND == "clamped_silu":
        return _held(x, limit) + 1.0
    else:
        return x


@triton.jit
def linear_slope(x, limit, KIND: tl.constexpr):
    """The derivative of `linear_part`."""
    if KIND == "clamped_silu":
        return tl.where(tl.abs(x) > limit, 0.0, 1.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)
