"""The product on GPUs: cuBLASLt's FP8 products for the layouts that it multiplies.

The others are emulated. MX and NVFP4 values are exact in bfloat16 but for NVFP4's global scales,
which come out of the sum: so the tensor cores' bfloat16 product is as good as one of float32.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from quaver.devices import has_fp8_block_gemm, has_fp8_gemm
from quaver.kernels.mx_cast.op import mx_dequantize
from quaver.kernels.nvfp4_cast.op import nvfp4_dequantize
from quaver.kernels.scaled_mm.layouts import (
    BLOCK_1D,
    BLOCK_2D,
    MX,
    NVFP4,
    NVFP4_2D,
    PLAIN,
    TENSOR,
    Scale,
)
from quaver.kernels.scaled_mm.reference import scaled_mm as reference

_MULTIPLE = 16
"""cuBLASLt wants rows of a multiple of so many bytes, and of so many columns in the output."""
_SIDE, _SCALES = 128, 4

_BLOCK_PAIRS = {(BLOCK_1D, BLOCK_1D), (BLOCK_1D, BLOCK_2D), (BLOCK_2D, BLOCK_1D)}
_EXACT = {MX, NVFP4, NVFP4_2D}


def scaled_mm(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    a: torch.Tensor,
    a_scale_inv: Scale,
    b: torch.Tensor,
    b_scale_inv: Scale,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    a_layout: str = TENSOR,
    b_layout: str = TENSOR,
    a_global_scale_inv: Scale = None,
    b_global_scale_inv: Scale = None,
    accurate: bool = True,
) -> torch.Tensor:
    """As the reference, within the bound of sums in another order.

    With `accurate` False, cuBLASLt sums in the tensor cores, whose accumulators keep fewer bits
    than float32. A bias is rounded to `dtype` before it is added, as under `torch.autocast`.
    """
    if a_layout == b_layout == TENSOR and has_fp8_gemm(a.device) and _multiplied(a, b):
        return _tensor_wise(a, a_scale_inv, b, b_scale_inv, bias, dtype, not accurate)
    if (a_layout, b_layout) in _BLOCK_PAIRS and has_fp8_block_gemm(a.device) and _multiplied(a, b):
        left, right = (a, a_scale_inv, a_layout), (b, b_scale_inv, b_layout)
        return _block_wise(left, right, bias, dtype)
    if a_layout == b_layout == PLAIN and a.dtype == b.dtype == dtype:
        return _with_bias(a @ b.t(), bias, dtype)
    if a_layout in _EXACT and b_layout in _EXACT:
        values = _exact(a, a_scale_inv, a_layout), _exact(b, b_scale_inv, b_layout)
        scales = (a_global_scale_inv, b_global_scale_inv)
        return _exact_product(values, scales, bias, dtype)
    return reference(
        a,
        a_scale_inv,
        b,
        b_scale_inv,
        bias,
        dtype,
        a_layout,
        b_layout,
        a_global_scale_inv,
        b_global_scale_inv,
        accurate,
    )


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether cuBLASLt has a product of such operands: neither of two E5M2, nor of nothing."""
    if a.dtype == torch.float8_e5m2 and b.dtype == torch.float8_e5m2:
        return False
    return a.numel() > 0 and b.numel() > 0


def _tensor_wise(
    a: torch.Tensor,
    a_scale: Scale,
    b: torch.Tensor,
    b_scale: Scale,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    if a_scale is None or b_scale is None:
        raise ValueError("this layout needs its scales")
    columns = b.shape[0]
    ragged = a.shape[1] % _MULTIPLE or columns % _MULTIPLE
    if ragged:
        a, b = _filled(a, False), _filled(b, True)
        bias = None if bias is None else pad(bias, (0, -columns % _MULTIPLE))
    inside = None
    if bias is not None and dtype != torch.float32:  # of which cuBLASLt has no sum with a bias
        inside, bias = bias.to(dtype), None
    y = torch._scaled_mm(
        a if a.is_contiguous() else a.contiguous(),
        (b if b.is_contiguous() else b.contiguous()).t(),
        a_scale,
        b_scale,
        inside,
        None,
        dtype,
        fast,
    )
    if bias is not None:
        y = y + bias
    return y[:, :columns].contiguous() if ragged else y


def _block_wise(
    left: tuple[torch.Tensor, Scale, str],
    right: tuple[torch.Tensor, Scale, str],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, columns = left[0].shape[0], right[0].shape[0]
    # cuBLASLt reads the scales of 128x128 in rows of a multiple of four.
    width = _SCALES * _SIDE if BLOCK_2D in (left[2], right[2]) else _MULTIPLE
    (a, a_scale), (b, b_scale) = (_blocks(*operand, width) for operand in (left, right))
    out = torch.float32 if dtype == torch.float16 else dtype  # of which there is no such product
    y = torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), None, None, out)
    if y.shape != (rows, columns):
        y = y[:rows, :columns].contiguous()
    return _with_bias(y, bias, out).to(dtype)


def _filled(x: torch.Tensor, rows_too: bool, width: int = _MULTIPLE) -> torch.Tensor:
    """FP8 x, contiguous, with zeros up to whole multiples."""
    below = -x.shape[0] % _MULTIPLE if rows_too else 0
    beside = -x.shape[1] % width
    if below or beside:
        return pad(x.view(torch.uint8), (0, beside, 0, below)).view(x.dtype)
    return x.contiguous()


def _blocks(
    x: torch.Tensor, scale: Scale, layout: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scales of blocks as cuBLASLt wants them, filled up to whole multiples.

    Of 1x128, neighbours in memory belong to neighbouring rows; of 128x128, to neighbouring columns.
    """
    if scale is None:
        raise ValueError("this layout needs its scales")
    x = _filled(x, True, width)
    below = 0 if layout == BLOCK_2D else x.shape[0] - scale.shape[0]
    beside = -(-x.shape[1] // _SIDE) - scale.shape[1]
    if below or beside:
        scale = pad(scale, (0, beside, 0, below), value=1.0)
    return x, scale.contiguous() if layout == BLOCK_2D else scale.t().contiguous().t()


def _exact(x: torch.Tensor, scale: Scale, layout: str) -> torch.Tensor:
    """What an MX or NVFP4 operand stands for, without its global scale, in bfloat16."""
    if scale is None:
        raise ValueError("this layout needs its scales")
    if layout == MX:
        value: torch.Tensor = mx_dequantize(x, scale, torch.bfloat16)
        return value
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    value = nvfp4_dequantize(x, scale, one, layout == NVFP4_2D, 2 * x.shape[1], torch.bfloat16)
    return value


def _exact_product(
    values: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[Scale, Scale],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    a, b = values
    width = min(a.shape[1], b.shape[1])  # FP4 fills an odd width up with a zero
    y = torch.mm(a[:, :width], b[:, :width].t(), out_dtype=torch.float32)
    for scale in scales:
        if scale is not None:
            y.mul_(scale)
    return _with_bias(y, bias, torch.float32).to(dtype)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return y if bias is None else y + bias.to(dtype)
