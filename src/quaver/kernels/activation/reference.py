"""Activations, forward, backward and cast to FP8, written out as a specification.

All arithmetic is float32. f is the nonlinearity in `formulas`; limit and alpha are parameters of
clamped_swiglu, and no other activation's.
"""

import torch

from quaver.kernels.activation.formulas import NONLINEARITIES, linear_part, linear_slope
from quaver.kernels.activation.names import (
    DEFAULT_ALPHA,
    DEFAULT_LIMIT,
    GATED,
    activated_shape,
    check_gradient,
)
from quaver.kernels.cast.reference import cast

Cast = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def activation(
    x: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    limit: float = DEFAULT_LIMIT,
    alpha: float = DEFAULT_ALPHA,
) -> torch.Tensor:
    """y = f(x); gated, with x = [a, b] side by side: y = f(a) * b, the first half being the gate.

    clamped_swiglu: y = z * sigmoid(alpha * z) * (1 + c), where z = min(a, limit) and c is b held
    within +-limit.

    Args:
        x: [M, W], float32, bfloat16 or float16, any strides.
        name: gelu, qgelu, relu, srelu or silu; gated: geglu, glu, qgeglu, reglu, sreglu, swiglu or
            clamped_swiglu.
        dtype: of y, which is rounded to it once.
        limit, alpha: of clamped_swiglu.

    Returns:
        [M, W], gated [M, W / 2], contiguous.

    Raises:
        QuaverError: as `activated_shape` says.
    """
    return _activated(x, name, limit, alpha).to(dtype).contiguous()


def _activated(x: torch.Tensor, name: str, limit: float, alpha: float) -> torch.Tensor:
    activated_shape(x, name)
    wide = x.to(torch.float32)
    if name not in GATED:
        return NONLINEARITIES[name].value(wide, limit, alpha)
    a, b = wide.chunk(2, 1)
    return NONLINEARITIES[GATED[name]].value(a, limit, alpha) * linear_part(b, name, limit)


def activation_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    name: str,
    limit: float = DEFAULT_LIMIT,
    alpha: float = DEFAULT_ALPHA,
) -> torch.Tensor:
    """dx = grad * f'(x); gated: [grad * f'(a) * b, grad * f(a)] side by side.

    Where clamped_swiglu clamps, that derivative is 0; on the limit it is not.

    Args:
        grad: [M, W], gated [M, W / 2], any floating-point dtype and strides.
        x, name, limit, alpha: as `activation` got them.

    Returns:
        [M, W] in x's dtype, contiguous.

    Raises:
        QuaverError: as `activated_shape` says, or grad has another shape than the activation.
    """
    return _derived(grad, x, name, limit, alpha).to(x.dtype).contiguous()


def _derived(
    grad: torch.Tensor, x: torch.Tensor, name: str, limit: float, alpha: float
) -> torch.Tensor:
    check_gradient(grad, x, name)
    wide, g = x.to(torch.float32), grad.to(torch.float32)
    if name not in GATED:
        return g * NONLINEARITIES[name].slope(wide, limit, alpha)
    a, b = wide.chunk(2, 1)
    f = NONLINEARITIES[GATED[name]]
    da = g * (f.slope(a, limit, alpha) * linear_part(b, name, limit))
    db = g * (f.value(a, limit, alpha) * linear_slope(b, name, limit))
    return torch.cat([da, db], 1)


def activation_cast(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    x: torch.Tensor,
    name: str,
    limit: float,
    alpha: float,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> Cast:
    """`activation` in float32, and its `cast` to FP8 without a rounding between them.

    Args:
        x, name, limit, alpha: as in `activation`.
        scale, amax, ready, slot, dtype, columnwise, margin: as in `cast`.

    Returns:
        The payload [M, H] in `dtype`; the transposed payload [H, M] (empty if not asked for);
        scale_inv, float32 [1].

    Raises:
        QuaverError: as `activated_shape` says.
    """
    y = _activated(x, name, limit, alpha).contiguous()
    return cast(y, scale, amax, ready, slot, dtype, columnwise, margin)


def activation_backward_cast(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    grad: torch.Tensor,
    x: torch.Tensor,
    name: str,
    limit: float,
    alpha: float,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`activation_backward` in float32, its `cast` to FP8, and its column sums.

    The sums are what the bias before the activation gets as its gradient. The gradient of a gated
    activation is rounded to x's dtype first: TransformerEngine, with whose scales and histories
    ours shall agree, casts only the others from float32.

    Args:
        grad, x, name, limit, alpha: as in `activation_backward`.
        scale, amax, ready, slot, dtype, columnwise, margin: as in `cast`.

    Returns:
        The payload [M, W] in `dtype`; the transposed payload [W, M] (empty if not asked for);
        scale_inv, float32 [1]; the sums over the rows, float32 [W], of what was cast.

    Raises:
        QuaverError: as `activation_backward` says.
    """
    dx = _derived(grad, x, name, limit, alpha).contiguous()
    if name in GATED:
        dx = dx.to(x.dtype).to(torch.float32)
    return *cast(dx, scale, amax, ready, slot, dtype, columnwise, margin), dx.sum(0)
