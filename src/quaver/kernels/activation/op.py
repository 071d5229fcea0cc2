"""The operators `activation`, `activation_backward`, `activation_cast` and the backward's."""

from typing import Any

import torch

from quaver.kernels.activation import reference
from quaver.kernels.activation.names import activated_shape, check_gradient
from quaver.kernels.door import Kernel
from quaver.kernels.library import define


def _fake(
    x: torch.Tensor, name: str, dtype: torch.dtype, limit: float = 0.0, alpha: float = 0.0
) -> torch.Tensor:
    return torch.empty(activated_shape(x, name), dtype=dtype, device=x.device)


def _fake_backward(
    grad: torch.Tensor, x: torch.Tensor, name: str, limit: float = 0.0, alpha: float = 0.0
) -> torch.Tensor:
    check_gradient(grad, x, name)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _casts(
    x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, columnwise: bool
) -> reference.Cast:
    data = torch.empty(shape, dtype=dtype, device=x.device)
    transposed = data.new_empty((shape[1], shape[0]) if columnwise else (0,))
    return data, transposed, data.new_empty(1, dtype=torch.float32)


def _fake_cast(x: torch.Tensor, name: str, limit: float, alpha: float, *rest: Any) -> Any:
    _scale, _amax, _ready, _slot, dtype, columnwise, *_margin = rest
    return _casts(x, activated_shape(x, name), dtype, columnwise)


def _fake_backward_cast(grad: torch.Tensor, x: torch.Tensor, name: str, *rest: Any) -> Any:
    _limit, _alpha, _scale, _amax, _ready, _slot, dtype, columnwise, *_margin = rest
    check_gradient(grad, x, name)
    sums = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    return *_casts(x, tuple(x.shape), dtype, columnwise), sums


_CAST = (
    "float limit, float alpha, Tensor scale, Tensor(a!)? amax, Tensor? ready, int slot, "
    "ScalarType dtype, bool columnwise, int margin=0) -> (Tensor, Tensor, Tensor"
)

activation = define(
    Kernel(reference.activation, triton="quaver.kernels.activation.triton"),
    "(Tensor x, str name, ScalarType dtype, float limit=7.0, float alpha=1.702) -> Tensor",
    _fake,
)

activation_backward = define(
    Kernel(reference.activation_backward, triton="quaver.kernels.activation.triton_backward"),
    "(Tensor grad, Tensor x, str name, float limit=7.0, float alpha=1.702) -> Tensor",
    _fake_backward,
)

activation_cast = define(
    Kernel(reference.activation_cast, triton="quaver.kernels.activation.triton"),
    f"(Tensor x, str name, {_CAST})",
    _fake_cast,
)

activation_backward_cast = define(
    Kernel(reference.activation_backward_cast, triton="quaver.kernels.activation.triton_backward"),
    f"(Tensor grad, Tensor x, str name, {_CAST}, Tensor)",
    _fake_backward_cast,
)
