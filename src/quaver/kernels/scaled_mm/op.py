"""The operators `scaled_mm` and `operand_values`."""

from typing import Any

import torch

from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.scaled_mm import layouts, native, reference

_SCHEMA = (
    "(Tensor a, Tensor? a_scale_inv, Tensor b, Tensor? b_scale_inv, Tensor? bias, "
    'ScalarType dtype, str a_layout="tensor", str b_layout="tensor", '
    "Tensor? a_global_scale_inv=None, Tensor? b_global_scale_inv=None, bool accurate=True) "
    "-> Tensor"
)


def _fake(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *layouts: Any,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


scaled_mm = define(Kernel(reference.scaled_mm, native=native.scaled_mm), _SCHEMA, _fake)


def _fake_values(
    data: torch.Tensor,
    scale_inv: torch.Tensor | None,
    layout: str,
    global_scale_inv: torch.Tensor | None = None,
) -> torch.Tensor:
    packed = 2 if layout in (layouts.NVFP4, layouts.NVFP4_2D) else 1
    return data.new_empty((data.shape[0], packed * data.shape[1]), dtype=torch.float32)


operand_values = define(
    Kernel(layouts.operand_values),
    "(Tensor data, Tensor? scale_inv, str layout, Tensor? global_scale_inv=None) -> Tensor",
    _fake_values,
)
