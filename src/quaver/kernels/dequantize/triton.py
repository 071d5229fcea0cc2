"""`dequantize` in Triton, along the memory of the payload."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import fp8_values, narrowed

BLOCK = 8192
WARPS = 8


@triton.jit
def _dequantize(
    data, x, scale_inv, count, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    value = fp8_values(tl.load(data + index, mask=mask), E5M2, NATIVE) * tl.load(scale_inv)
    tl.store(x + index, narrowed(value, x.dtype.element_ty, NATIVE), mask=mask)


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the reference."""
    x = torch.empty_like(data, dtype=dtype)
    if data.is_contiguous() or (data.dim() == 2 and data.t().is_contiguous()):
        _along_memory(data, scale_inv, x)
    else:  # rare: dimensions in another order, or holes
        between = torch.empty(data.shape, dtype=dtype, device=data.device)
        _along_memory(data.contiguous(), scale_inv, between)
        x.copy_(between)
    return x


def _along_memory(data: torch.Tensor, scale_inv: torch.Tensor, x: torch.Tensor) -> None:
    count = data.numel()
    if count == 0:
        return
    launch_grid(
        _dequantize,
        (cdiv(count, BLOCK),),
        data.view(torch.uint8),
        x,
        scale_inv,
        count,
        E5M2=data.dtype == torch.float8_e5m2,
        NATIVE=is_native(_dequantize, data.device),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
