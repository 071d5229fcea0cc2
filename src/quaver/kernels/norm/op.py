"""The operators `norm`, `norm_backward` and `norm_cast`."""

from typing import Any

import torch

from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.norm import reference


def _statistics(x: torch.Tensor, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.new_empty(0 if rms else x.shape[0], dtype=torch.float32)
    return mean, x.new_empty(x.shape[0], dtype=torch.float32)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    dtype: torch.dtype,
) -> reference.Norm:
    reference.check_norm(x, weight, bias, rms)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, *_statistics(x, rms)


def _fake_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    rms: bool,
) -> reference.Norm:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if weight is None:
        return dx, rstd.new_empty(0), rstd.new_empty(0)
    dweight = weight.new_empty(x.shape[1])
    return dx, dweight, rstd.new_empty(0) if rms else torch.empty_like(dweight)


def _fake_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    rms: bool,
    scale: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    reference.check_norm(x, weight, bias, rms)
    _amax, _ready, _slot, dtype, columnwise, *_margin = rest
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    transposed = data.new_empty((x.shape[1], x.shape[0]) if columnwise else (0,))
    return data, transposed, scale.new_empty(1), *_statistics(x, rms)


norm = define(
    Kernel(reference.norm, triton="quaver.kernels.norm.triton"),
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool zero_centered, bool rms, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _fake,
)

norm_backward = define(
    Kernel(reference.norm_backward, triton="quaver.kernels.norm.triton_backward"),
    "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool zero_centered, "
    "bool rms) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)

norm_cast = define(
    Kernel(reference.norm_cast, triton="quaver.kernels.norm.triton"),
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool zero_centered, bool rms, "
    "Tensor scale, Tensor(a!)? amax, Tensor? ready, int slot, ScalarType dtype, bool columnwise, "
    "int margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_cast,
)
