"""The product of FP8 operands, against NumPy in float64."""

import numpy as np
import pytest
import torch

from quaver.errors import QuaverError
from quaver.kernels import (
    block_cast,
    block_dequantize,
    mx_cast,
    mx_dequantize,
    nvfp4_cast,
    nvfp4_dequantize,
    scaled_mm,
)
from tests.kernels import numerics
from tests.samples import FORMATS, normal

SHAPES = [(16, 24, 32), (0, 8, 16), (1, 1, 1), (13, 7, 30), (5, 3, 0), (33, 17, 700)]


def operand(rows: int, columns: int, fmt: torch.dtype, name: str) -> torch.Tensor:
    return normal(rows, columns, name=name).mul(40).to(fmt)


def expected(a, a_scale, b, b_scale, bias) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of its terms' magnitudes."""
    left = numerics.dequantized(a, a_scale).astype(np.float64)
    right = numerics.dequantized(b, b_scale).astype(np.float64)
    addend = 0.0 if bias is None else numerics.to_float32(bias).astype(np.float64)
    return left @ right.T + addend, np.abs(left) @ np.abs(right).T + np.abs(addend)


@pytest.mark.parametrize("formats", [(FORMATS[0],) * 2, FORMATS, FORMATS[::-1]], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_in_float32(shape, with_bias: bool, formats) -> None:
    m, n, k = shape
    a, b = operand(m, k, formats[0], "a"), operand(n, k, formats[1], "b")
    a_scale, b_scale = torch.tensor([0.013]), torch.tensor([2.7])
    bias = normal(n, name="bias") if with_bias else None
    got = scaled_mm(a, a_scale, b, b_scale, bias, torch.float32)
    exact, magnitude = expected(a, a_scale, b, b_scale, bias)
    assert got.shape == (m, n)
    assert got.dtype == torch.float32
    bound = (k + 2) * 2.0**-24 * magnitude  # a float32 sum in any order
    assert (np.abs(got.numpy() - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_to_the_output_once(dtype) -> None:
    """Also with a bias of the output's dtype: product and bias are added in float32."""
    a, b = operand(32, 64, FORMATS[0], "a"), operand(48, 64, FORMATS[0], "b")
    scale, bias = torch.tensor([2.0**-6]), normal(48, dtype=dtype, name="bias")
    got = scaled_mm(a, scale, b, scale, bias, dtype)
    exact, magnitude = expected(a, scale, b, scale, bias)
    assert got.dtype == dtype
    half_step = torch.finfo(dtype).eps / 2 * np.abs(exact)
    assert (np.abs(numerics.to_float32(got) - exact) <= half_step * 1.001 + 1e-5 * magnitude).all()


def test_transposed_operands_give_what_their_copies_give() -> None:
    a, b = operand(24, 10, FORMATS[1], "a").t(), operand(24, 6, FORMATS[0], "b").t()
    one = torch.ones(1)
    got = scaled_mm(a, one, b, one, None, torch.float32)
    assert torch.equal(
        got, scaled_mm(a.contiguous(), one, b.contiguous(), one, None, torch.float32)
    )


def test_nan_and_zero_rows_stay_in_their_row() -> None:
    a = operand(4, 16, FORMATS[0], "a").to(torch.float32)
    a[1], a[2, 3] = 0.0, torch.nan
    b, one = operand(5, 16, FORMATS[0], "b"), torch.ones(1)
    got = scaled_mm(a.to(FORMATS[0]), one, b, one, None, torch.float32)
    assert (got[1] == 0).all()
    assert got[2].isnan().all()
    assert got[[0, 3]].isfinite().all()


# ---- layouts

LAYOUTS = ("plain", "tensor", "block_1d", "block_2d", "mx", "nvfp4", "nvfp4_2d")
Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def made_of(x: torch.Tensor, layout: str) -> tuple[Parts, torch.Tensor]:
    """Data, scales and global scale of x in `layout`, and the values that they stand for."""
    one = torch.float32
    if layout == "plain":
        return (x, None, None), x
    if layout == "tensor":
        data, scale = (x * 40).to(FORMATS[0]), torch.tensor([1 / 40])
        return (data, scale, None), torch.from_numpy(numerics.dequantized(data, scale))
    if layout.startswith("block"):
        dim = int(layout[-2])
        data, scale = block_cast(x, FORMATS[0], dim, True, 0.0, True, False)[:2]
        return (data, scale, None), block_dequantize(data, scale, dim, one)
    if layout == "mx":
        data, scale = mx_cast(x, FORMATS[0], True, False)[:2]
        return (data, scale, None), mx_dequantize(data, scale, one)
    two = layout == "nvfp4_2d"
    data, scale, *_, top = nvfp4_cast(x, two, False, 0, 0, True, False)
    return (data, scale, top), nvfp4_dequantize(data, scale, top, two, x.shape[1], one)


@pytest.mark.parametrize("k", [160, 33])
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_any_two_layouts_are_multiplied_by_their_values(left: str, right: str, k: int) -> None:
    """An odd width too, which FP4 fills up with a zero."""
    a, b, bias = normal(20, k, name="a"), normal(24, k, name="b"), normal(24, name="bias")
    (a_data, a_scale, a_top), a_values = made_of(a, left)
    (b_data, b_scale, b_top), b_values = made_of(b, right)
    got = scaled_mm(
        a_data, a_scale, b_data, b_scale, bias, torch.float32, left, right, a_top, b_top
    )
    exact = a_values.double() @ b_values.double().t() + bias
    magnitude = a_values.double().abs() @ b_values.double().abs().t() + bias.abs()
    assert ((got - exact).abs() <= (k + 2) * 2.0**-24 * magnitude).all()
    wanted = a @ b.t() + bias
    assert (got - wanted).norm() < 0.25 * wanted.norm()


def test_an_unknown_layout_and_a_missing_scale_are_errors() -> None:
    a, one = operand(4, 8, FORMATS[0], "a"), torch.ones(1)
    with pytest.raises(QuaverError, match=r"one of plain, tensor, .* not 'rows'"):
        scaled_mm(a, one, a, one, None, torch.float32, "rows")
    with pytest.raises(QuaverError, match="needs its scales"):
        scaled_mm(a, one, a, None, None, torch.float32)
