"""Float8Quantizer on its own: values, usages, devices, refusals."""

import numpy as np
import pytest
import torch

import quaver as qv
from quaver.testing import launches
from tests.kernels import numerics
from tests.samples import DTYPES, FORMATS, NAMES, normal, sample

E4M3 = torch.float8_e4m3fn


def quantizer(scale: float = 3.7, device="cpu", dtype=E4M3, **usages) -> qv.Float8Quantizer:
    return qv.Float8Quantizer(
        torch.tensor([scale], device=device), torch.zeros(1, device=device), dtype, **usages
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_both_copies_of_every_sample(name: str, dtype, fmt) -> None:
    x = sample(name, dtype)
    quantize = quantizer(dtype=fmt)
    t = quantize(x)
    assert (t.shape, t.dtype, t.fp8_dtype, t.device) == (x.shape, dtype, fmt, x.device)
    expected = numerics.cast_bits(x, 3.7, fmt)
    np.testing.assert_array_equal(numerics.payload_bits(t.rowwise_data), expected)
    rows = expected.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
    np.testing.assert_array_equal(numerics.payload_bits(t.columnwise_data), rows.T)
    np.testing.assert_array_equal(
        t.rowwise_scale_inv.numpy(), numerics.divided(1.0, np.float32([3.7]))
    )
    assert quantize.amax.numpy() == numerics.amax_of(x)
    back = t.dequantize()
    assert (back.shape, back.dtype, type(back)) == (x.shape, dtype, torch.Tensor)
    values = torch.from_numpy(numerics.dequantized(t.rowwise_data, t.rowwise_scale_inv))
    torch.testing.assert_close(back, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_the_amax_is_the_largest_of_all_calls() -> None:
    quantize = quantizer()
    for value in (1.0, 5.0, 2.0):
        quantize(torch.tensor([value, -0.5]))
    assert quantize.amax.item() == 5.0


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 1, 3, 8), (8,)], ids=str)
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
def test_each_usage_makes_its_copy_and_holds_the_same_values(
    shape, rowwise: bool, columnwise: bool
) -> None:
    x = normal(*shape)
    t = quantizer(rowwise=rowwise, columnwise=columnwise)(x)
    assert (t.rowwise_data is not None) == rowwise
    assert (t.columnwise_data is not None) == columnwise
    assert (t.columnwise_scale_inv is not None) == columnwise
    if columnwise:
        assert t.columnwise_data.shape == (shape[-1], x.numel() // shape[-1])
        assert torch.equal(t.columnwise_scale_inv, t.rowwise_scale_inv)
    assert t.shape == shape
    assert torch.equal(t.dequantize(), quantizer()(x).dequantize())
    payload = t.payload()
    assert payload.data.shape == shape


def test_gradients_do_not_flow_through_it() -> None:
    x = normal(3, 4).requires_grad_()
    t = quantizer()(x)
    assert not t.requires_grad
    assert not t.dequantize().requires_grad


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_it_runs_where_the_tensor_is_while_another_device_is_current(devices, fmt) -> None:
    x = normal(7, 30)
    expected = quantizer(dtype=fmt)(x)
    there = x.to(devices[1])
    quantize = quantizer(device=devices[1], dtype=fmt)
    with launches() as log:
        for _ in range(5):
            t = quantize(there)
            back = t.dequantize()
    assert torch.accelerator.current_device_index() == 0
    assert {(entry.device, entry.current) for entry in log} == {(devices[1], devices[1])}
    assert [entry.kernel for entry in log] == ["cast", "dequantize"] * 5
    for part in (t.rowwise_data, t.columnwise_data, t.rowwise_scale_inv, back, t):
        assert part.device == devices[1]
    assert torch.equal(
        t.rowwise_data.view(torch.uint8).cpu(), expected.rowwise_data.view(torch.uint8)
    )
    assert torch.equal(back.cpu(), expected.dequantize())
    assert quantize.amax.cpu().item() == x.abs().max().item()


def test_a_scale_on_another_device_is_an_error_that_names_both(devices) -> None:
    x = normal(2, 4, device=devices[1])
    with pytest.raises(qv.DeviceMismatchError, match=f"x is on {devices[1]} and scale is on cpu"):
        quantizer()(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "dtype must be one of"),
        ({"dtype": torch.float8_e8m0fnu}, "dtype must be one of"),
        ({"rowwise": False, "columnwise": False}, "at least one of rowwise and columnwise"),
        ({"scale": torch.ones(2)}, "scale must be a float32 tensor of one element"),
        ({"scale": torch.ones(1, dtype=torch.bfloat16)}, "scale must be a float32 tensor"),
        ({"amax": torch.zeros(1, dtype=torch.float64)}, "amax must be a float32 tensor"),
    ],
    ids=str,
)
def test_what_it_refuses(options, message: str) -> None:
    arguments = {"scale": torch.ones(1), "amax": torch.zeros(1), "dtype": E4M3} | options
    with pytest.raises(qv.RecipeError, match=message) as caught:
        qv.Float8Quantizer(**arguments)
    assert "\n" not in str(caught.value)
