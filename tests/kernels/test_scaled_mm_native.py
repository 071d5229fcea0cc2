"""The product by cuBLASLt, which only GPUs have: what it is asked for, and what is made of it.

A stand-in for torch._scaled_mm refuses what cuBLASLt refuses, and computes in float32.
"""

import pytest
import torch

from quaver.kernels import block_cast, current_cast, mx_cast, nvfp4_cast, scaled_mm
from quaver.kernels.scaled_mm import layouts, native
from tests.samples import normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scales_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The scale of each value of x [rows, K], if it has one of the layouts that are allowed."""
    rows, width = x.shape
    blocks = -(-width // 128)
    if scale.numel() == 1 and scale.dim() < 2:
        return scale.expand(rows, width)
    if scale.shape == (rows, blocks) and scale.stride() == (1, rows):
        return scale.repeat_interleave(128, 1)[:, :width]
    assert scale.shape == (-(-rows // 128), blocks)
    assert scale.stride() == (blocks, 1)
    assert blocks % 4 == 0, "a row of scales must be aligned to 16 bytes"
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]


class CuBLASLt:
    """What torch._scaled_mm does on Hopper."""

    def __init__(self) -> None:
        self.fast: list[bool] = []

    def __call__(
        self, a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, fast=False
    ) -> torch.Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 16 == 0
        assert b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} != {E5M2}
        assert bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
        if scale_a.numel() > 1 or scale_b.numel() > 1:
            assert a.shape[0] % 4 == 0
            assert out_dtype in (torch.bfloat16, torch.float32)
        self.fast.append(fast)
        right = scale_b.t() if scale_b.dim() == 2 else scale_b
        left_values = a.float() * scales_of(a, scale_a)
        y = left_values @ (b.t().float() * scales_of(b.t(), right)).t()
        return (y if bias is None else y + bias).to(out_dtype)


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> CuBLASLt:
    stand_in = CuBLASLt()
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    monkeypatch.setattr(native, "has_fp8_gemm", lambda device: True)
    monkeypatch.setattr(native, "has_fp8_block_gemm", lambda device: True)
    return stand_in


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    scale = expected.float().abs().max().item()
    # One rounding to the dtype more, of the bias or of the sum before it.
    step = 2**-22 if got.dtype == torch.float32 else 2**-7
    assert (got.float() - expected.float()).abs().max().item() <= step * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 48), (13, 30, 7), (1, 16, 16)], ids=str)
def test_one_scale_a_tensor(cublas: CuBLASLt, dtype, bias_dtype, shape) -> None:
    rows, width, columns = shape
    a, _, a_scale = current_cast(normal(rows, width), E5M2, False, 0.0, None, False)
    b, _, b_scale = current_cast(normal(columns, width), E4M3, False, 0.0, None, False)
    bias = None if bias_dtype is None else normal(columns, dtype=bias_dtype)
    got = native.scaled_mm(a, a_scale, b, b_scale, bias, dtype)
    assert_close(got, scaled_mm(a, a_scale, b, b_scale, bias, dtype))
    assert cublas.fast == [False]


def test_a_product_that_need_not_be_accurate_is_fast(cublas: CuBLASLt) -> None:
    a, _, scale = current_cast(normal(16, 16), E4M3, False, 0.0, None, False)
    native.scaled_mm(a, scale, a, scale, None, torch.bfloat16, accurate=False)
    assert cublas.fast == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", [(256, 512, 128), (200, 300, 130), (5, 640, 3)], ids=str)
def test_blocks(cublas: CuBLASLt, dtype, dims, shape) -> None:
    rows, width, columns = shape
    a, a_scale, *_ = block_cast(normal(rows, width), E4M3, dims[0], True, 0.0, True, False)
    b, b_scale, *_ = block_cast(normal(columns, width), E4M3, dims[1], True, 0.0, True, False)
    bias = normal(columns)
    names = [layouts.BLOCK_1D if dim == 1 else layouts.BLOCK_2D for dim in dims]
    got = native.scaled_mm(a, a_scale, b, b_scale, bias, dtype, *names)
    assert_close(got, scaled_mm(a, a_scale, b, b_scale, bias, dtype, *names))
    assert len(cublas.fast) == 1


@pytest.mark.parametrize("empty", [(0, 16, 16), (4, 16, 0), (4, 0, 16)], ids=str)
def test_nothing_is_not_handed_over(cublas: CuBLASLt, empty) -> None:
    rows, width, columns = empty
    one = torch.ones(1)
    a, b = torch.empty(rows, width, dtype=E4M3), torch.empty(columns, width, dtype=E4M3)
    got = native.scaled_mm(a, one, b, one, None, torch.bfloat16)
    assert torch.equal(got, torch.zeros(rows, columns, dtype=torch.bfloat16))
    assert not cublas.fast


def test_two_gradients_are_not_handed_over(cublas: CuBLASLt) -> None:
    a, _, scale = current_cast(normal(16, 16), E5M2, False, 0.0, None, False)
    got = native.scaled_mm(a, scale, a, scale, None, torch.float32)
    assert torch.equal(got, scaled_mm(a, scale, a, scale, None, torch.float32))
    assert not cublas.fast


def product_by_float64(a, b, out_dtype=None) -> torch.Tensor:
    assert a.dtype == b.dtype == torch.bfloat16, "the tensor cores' dtype"
    return (a.double() @ b.double()).to(out_dtype)


@pytest.mark.parametrize("width", [64, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_and_nvfp4_are_exact_in_bfloat16(monkeypatch, width: int, dtype) -> None:
    monkeypatch.setattr(torch, "mm", product_by_float64)
    x, w, bias = normal(5, width), normal(7, width, name="w"), normal(7, name="bias")
    a, a_scale, *_ = mx_cast(x, E4M3, True, False)
    b, b_scale, *_ = mx_cast(w, E5M2, True, False)
    arguments = (a, a_scale, b, b_scale, bias, dtype, layouts.MX, layouts.MX)
    assert_close(native.scaled_mm(*arguments), scaled_mm(*arguments))
    a, a_scale, _, _, a_top = nvfp4_cast(x, False, False, 0, 0, True, False)
    b, b_scale, _, _, b_top = nvfp4_cast(w, True, False, 0, 0, True, False)
    names = (layouts.NVFP4, layouts.NVFP4_2D)
    arguments = (a, a_scale, b, b_scale, bias, dtype, *names, a_top, b_top)
    assert_close(native.scaled_mm(*arguments), scaled_mm(*arguments))


def test_plain_operands_of_one_dtype_are_multiplied_in_it() -> None:
    a, b = normal(4, 8, dtype=torch.bfloat16), normal(3, 8, dtype=torch.bfloat16, name="b")
    plain = (layouts.PLAIN, layouts.PLAIN)
    got = native.scaled_mm(a, None, b, None, None, torch.bfloat16, *plain)
    assert_close(got, scaled_mm(a, None, b, None, None, torch.bfloat16, *plain))
