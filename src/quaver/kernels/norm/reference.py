"""Layer norm and RMS norm, forward, backward and cast to FP8, written out as a specification.

Formulas: Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer
Normalization" (2019). All arithmetic is float32.
"""

import torch

from quaver.errors import QuaverError
from quaver.kernels.cast.reference import cast

Norm = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, rms: bool
) -> None:
    """Refuse what the norms do not know.

    Raises:
        QuaverError: x is no matrix, a parameter is no vector of its width, or RMS norm got a bias.
    """
    if x.dim() != 2:
        raise QuaverError(f"x must have 2 dimensions, not shape {tuple(x.shape)}; reshape it")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[1:]:
            raise QuaverError(
                f"{name} must have shape {tuple(x.shape[1:])}, x's last dimension, "
                f"not {tuple(parameter.shape)}"
            )
    if rms and bias is not None:
        raise QuaverError("RMS norm has no bias; pass bias=None, or take layer norm (rms=False)")


def check_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rms: bool
) -> None:
    """Refuse what the norms' gradients do not know.

    Raises:
        QuaverError: as `check_norm` says, or grad has not the shape of x.
    """
    check_norm(x, weight, None, rms)
    if grad.shape != x.shape:
        raise QuaverError(f"grad must have x's shape {tuple(x.shape)}, not {tuple(grad.shape)}")


def gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """What multiplies the normalized x: weight, or 1 + weight, in float32."""
    wide = weight.to(torch.float32)
    return wide + 1.0 if zero_centered else wide


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    dtype: torch.dtype,
) -> Norm:
    """y = (x - mean) * rstd * gain + bias, row by row; rstd = 1 / sqrt(mean((x - mean)^2) + eps).

    RMS norm takes 0 for the mean.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.
        weight: [K] of any of these dtypes, the gain; None: 1.
        bias: [K] or None, likewise; None with `rms`.
        eps: added to the mean square.
        zero_centered: the gain is 1 + weight.
        rms: RMS norm instead of layer norm.
        dtype: of y, which is rounded to it once.

    Returns:
        y [M, K], contiguous; mean, float32 [M] (empty with `rms`); rstd, float32 [M].

    Raises:
        QuaverError: as `check_norm` says.
    """
    check_norm(x, weight, bias, rms)
    wide = x.to(torch.float32)
    if rms:
        mean, centered = wide.new_empty(0), wide
    else:
        mean = wide.mean(1)
        centered = wide - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + eps)
    y = centered * rstd[:, None]
    if weight is not None:
        y = y * gain(weight, zero_centered)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(dtype, memory_format=torch.contiguous_format).contiguous(), mean, rstd


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    rms: bool,
) -> Norm:
    """The gradients of `norm`.

    With n = (x - mean) * rstd and g = grad * gain, of each row
    dx = rstd * (g - n * mean(g * n) - mean(g)), without the last term for RMS norm;
    of each column dweight = sum(grad * n) and dbias = sum(grad).

    Args:
        grad: [M, K], of y, any floating-point dtype and strides.
        x, weight, zero_centered, rms: as `norm` got them.
        mean, rstd: as `norm` gave them.

    Returns:
        dx [M, K] in x's dtype, contiguous; dweight [K] in weight's dtype (float32 and empty without
        a weight); dbias [K] in weight's dtype (float32 and empty without a weight or with `rms`).

    Raises:
        QuaverError: as `check_backward` says.
    """
    check_backward(grad, x, weight, rms)
    wide, wide_grad = x.to(torch.float32), grad.to(torch.float32)
    normalized = (wide if rms else wide - mean[:, None]) * rstd[:, None]
    g = wide_grad if weight is None else wide_grad * gain(weight, zero_centered)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not rms:
        dx = dx - g.mean(1, keepdim=True)
    dx = (dx * rstd[:, None]).to(x.dtype).contiguous()
    if weight is None:
        return dx, rstd.new_empty(0), rstd.new_empty(0)
    dweight = (wide_grad * normalized).sum(0).to(weight.dtype)
    dbias = rstd.new_empty(0) if rms else wide_grad.sum(0).to(weight.dtype)
    return dx, dweight, dbias


def norm_cast(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    ready: torch.Tensor | None,
    slot: int,
    dtype: torch.dtype,
    columnwise: bool,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm` in float32, and its `cast` to FP8 without a rounding between them.

    Args:
        x, weight, bias, eps, zero_centered, rms: as in `norm`.
        scale, amax, ready, slot, dtype, columnwise, margin: as in `cast`.

    Returns:
        The payload [M, K] in `dtype`; the transposed payload [K, M] (empty if not asked for);
        scale_inv, float32 [1]; mean, float32 [M] (empty with `rms`); rstd, float32 [M].

    Raises:
        QuaverError: as `check_norm` says.
    """
    y, mean, rstd = norm(x, weight, bias, eps, zero_centered, rms, torch.float32)
    return *cast(y, scale, amax, ready, slot, dtype, columnwise, margin), mean, rstd
