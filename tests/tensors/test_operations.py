"""What torch's operations do with a Float8Tensor."""

import copy

import pytest
import torch

import quaver as qv
from tests.samples import normal
from tests.tensors.make import consistent, float8, same, same_payload, without_quantizer

USAGES = [
    {"rowwise": True, "columnwise": True},
    {"rowwise": True, "columnwise": False},
    {"rowwise": False, "columnwise": True},
]
usages = pytest.mark.parametrize("usage", USAGES, ids=lambda u: "".join(k[0] for k in u if u[k]))


# ---- what keeps it quantized


@usages
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)], ids=str)
def test_detach_shares_and_clone_copies(shape, usage) -> None:
    t = float8(*shape, **usage)
    detached, cloned = t.detach(), t.clone()
    for twin in (detached, cloned):
        assert isinstance(twin, qv.Float8Tensor)
        assert (twin.shape, twin.dtype) == (t.shape, t.dtype)
        assert same_payload(twin, t)
    assert detached.data_ptr() == t.data_ptr()
    assert cloned.data_ptr() != t.data_ptr()
    with torch.no_grad():
        cloned.zero_()
    assert t.dequantize().abs().max() > 0


@usages
def test_views_keep_the_values(usage) -> None:
    t = float8(6, 8, **usage)
    x = t.dequantize()
    for view, expected in [
        (t.view(3, 2, 8), x.view(3, 2, 8)),
        (t.view(-1), x.view(-1)),
        (t.reshape(12, 4), x.reshape(12, 4)),
        (t.unsqueeze(0), x.unsqueeze(0)),
        (t.unsqueeze(0).squeeze(0), x),
        (t[2:4], x[2:4]),
        (t[1], x[1]),
        (t.t(), x.t()),
        (t.transpose(0, 1), x.transpose(0, 1)),
        (t.permute(1, 0), x.permute(1, 0)),
        (t.view(3, 2, 8).transpose(0, 2), x.view(3, 2, 8).transpose(0, 2)),
        (t.t().t(), x),
    ]:
        assert isinstance(view, qv.Float8Tensor)
        assert view.shape == expected.shape
        assert torch.equal(view.dequantize(), expected)
        if view.columnwise_data is not None and view.rowwise_data is not None:
            assert consistent(view)


@usages
def test_a_move_takes_payload_and_scale_along(devices, usage) -> None:
    t = float8(6, 8, device=devices[0], **usage)
    moved = t.to(devices[1])
    assert moved.device == devices[1]
    for part in (moved.rowwise_data, moved.columnwise_data, moved.rowwise_scale_inv):
        assert part is None or part.device == devices[1]
    assert same_payload(moved, t)
    assert t.device == devices[0]
    assert same_payload(t.cpu(), t)
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_is_only_nominal(dtype) -> None:
    t = float8(6, 8)
    cast = t.to(dtype)
    assert isinstance(cast, qv.Float8Tensor)
    assert cast.dtype == dtype
    assert same_payload(cast, t)
    assert cast.dequantize().dtype == dtype
    assert torch.equal(cast.dequantize(), t.dequantize().to(dtype))
    assert same_payload(t.bfloat16(), t)


def test_float_and_a_named_dtype_dequantize() -> None:
    t = float8(6, 8, dtype=torch.bfloat16)
    assert t.dequantize().dtype == torch.bfloat16
    assert type(t.float()) is torch.Tensor
    assert t.float().dtype == torch.float32
    assert torch.equal(t.dequantize(torch.float32), t.float())


def test_empty_like_is_a_float8_tensor_of_its_own() -> None:
    t = float8(6, 8)
    fresh = torch.empty_like(t)
    assert isinstance(fresh, qv.Float8Tensor)
    assert fresh.shape == t.shape
    assert fresh.data_ptr() != t.data_ptr()


@usages
def test_deepcopy_is_independent(usage) -> None:
    t = float8(2, 3, 8, **usage)
    t.note = "kept"
    twin = copy.deepcopy(t)
    assert same_payload(twin, t)
    assert twin.note == "kept"
    with torch.no_grad():
        twin.zero_()
    assert t.dequantize().abs().max() > 0
    pair = copy.deepcopy([t, t])
    assert pair[0] is pair[1]


def test_equal_compares_payload_and_scale() -> None:
    t = float8(6, 8)
    assert torch.equal(t, t.clone())
    other = t.clone()
    with torch.no_grad():
        other.mul_(1.5)
    assert not torch.equal(t, other)
    half = qv.Float8Tensor(t.rowwise_data, t.rowwise_scale_inv / 2)
    assert not torch.equal(t, half)
    assert torch.equal(t, t.dequantize())
    assert not torch.equal(t, t.dequantize() + 1)


# ---- writing to it


@usages
def test_copy_from_high_precision_requantizes_with_the_quantizer(usage) -> None:
    t, x = float8(2, 3, 8, **usage), normal(2, 3, 8, name="new")
    pointer = t.data_ptr()
    t.copy_(x)
    assert same_payload(t, t.quantizer(x))
    assert t.data_ptr() == pointer
    assert t.quantizer.amax.item() >= x.abs().max().item()


@usages
def test_copy_from_another_float8_takes_its_payload(usage) -> None:
    t, source = float8(2, 3, 8, **usage), float8(2, 3, 8, scale=100.0)
    source.mul_(0.5)
    t.copy_(source)
    assert torch.equal(t.dequantize(), source.dequantize())
    assert same(t.rowwise_scale_inv, source.rowwise_scale_inv)
    if t.rowwise_data is not None and t.columnwise_data is not None:
        assert consistent(t)


def test_copy_between_devices_and_from_a_smaller_shape(devices) -> None:
    t = float8(6, 8, device=devices[1])
    row = normal(8, name="row")
    t.copy_(row)
    assert t.device == devices[1]
    assert torch.equal(t.dequantize().cpu(), float8(6, 8).quantizer(row.expand(6, 8)).dequantize())


def test_copy_into_a_plain_tensor_dequantizes() -> None:
    t, target = float8(6, 8), torch.zeros(6, 8, dtype=torch.bfloat16)
    target.copy_(t)
    assert torch.equal(target, t.dequantize().to(torch.bfloat16))


@usages
def test_an_in_place_update_requantizes(usage) -> None:
    t = float8(6, 8, **usage)
    x = t.dequantize()
    assert t.add_(0.3, alpha=2) is t
    assert same_payload(t, t.quantizer(x + 0.6))
    t.mul_(torch.full((6, 1), 2.0))
    assert same_payload(t, t.quantizer(t.quantizer(x + 0.6).dequantize() * 2))


def test_without_a_quantizer_the_own_amax_gives_the_scale() -> None:
    t = without_quantizer(6, 8)
    x = t.dequantize() * 5
    t.mul_(5)
    scale = torch.tensor(448.0) / x.abs().max()
    expected = qv.Float8Quantizer(scale.reshape(1), torch.zeros(1), t.fp8_dtype)(x)
    assert same_payload(t, expected)


def test_a_moved_tensor_can_be_updated_where_it_is(devices) -> None:
    t = float8(6, 8, device=devices[0])
    moved = t.to(devices[1])
    expected = t.quantizer(t.dequantize() * 2)
    moved.mul_(2)
    assert moved.device == devices[1]
    assert same_payload(moved, expected)


@pytest.mark.parametrize("make", [float8, without_quantizer])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[0],
        lambda t: t[1:3],
        lambda t: t.t(),
        lambda t: t.view(12, 4),
        lambda t: t.view(2, 3, 8),
    ],
    ids=["select", "slice", "t", "reshaped", "split"],
)
def test_writing_through_a_view_changes_those_values_or_is_refused(make, view) -> None:
    """Not the others, whose scale is shared, and not one of the two copies alone."""
    t = make(6, 8)
    expected = t.dequantize()
    view(expected).zero_()
    before = t.clone()
    if written(lambda: view(t).zero_()):
        assert torch.equal(t.dequantize(), expected)
        assert consistent(t)
    else:
        assert same_payload(t, before)


def test_a_view_of_a_columnwise_tensor_can_be_written_or_says_that_it_cannot() -> None:
    t = float8(6, 8, rowwise=False)
    x = t.dequantize()
    if written(lambda: t.view(3, 2, 8).mul_(2)):
        x = x * 2
    assert torch.equal(t.dequantize(), x)


def written(write) -> bool:
    """Whether `write` wrote; False: it was refused, with the remedy."""
    try:
        write()
    except NotImplementedError as error:
        if "dequantize" not in str(error):
            raise
        return False
    return True


# ---- what reads it as a plain tensor, and what is refused


def test_operations_that_read_it_give_what_its_values_give() -> None:
    t, other = float8(6, 8), normal(6, 8, name="other")
    x = t.dequantize()
    pairs = [
        (t + other, x + other),
        (other * t, other * x),
        (t @ other.t(), x @ other.t()),
        (torch.nn.functional.linear(other, t), torch.nn.functional.linear(other, x)),
        (
            torch.addmm(other.new_zeros(6), t, other.t()),
            torch.addmm(other.new_zeros(6), x, other.t()),
        ),
        (t.abs().amax(), x.abs().amax()),
        (t.norm(), x.norm()),
        (-t, -x),
        (t > other, x > other),
        (torch.cat([t, other]), torch.cat([x, other])),
        (torch.zeros_like(t), torch.zeros_like(x)),
    ]
    for got, expected in pairs:
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "operation",
    [torch.sort, torch.fft.fft, torch.cumprod, lambda t: t.unfold(0, 2, 1)],
    ids=["sort", "fft", "cumprod", "unfold"],
)
def test_an_operation_without_a_meaning_names_dequantize(operation) -> None:
    arguments = (float8(6, 8), 0) if operation is torch.cumprod else (float8(6, 8),)
    with pytest.raises(NotImplementedError, match=r"Float8Tensor; call it on `.dequantize\(\)`"):
        operation(*arguments)


def test_gradients_flow_through_a_product_with_it() -> None:
    t = float8(6, 8).requires_grad_()
    x = normal(4, 8, name="x").requires_grad_()
    (x @ t.t()).sum().backward()
    values = t.dequantize().detach()
    torch.testing.assert_close(x.grad, values.sum(0).expand(4, 8))
    torch.testing.assert_close(t.grad, x.detach().sum(0).expand(6, 8))


def test_repr_says_format_shape_scale_and_device(devices) -> None:
    text = repr(float8(6, 8, device=devices[1], dtype=torch.bfloat16))
    for part in ("Float8Tensor", "E4M3", "(6, 8)", "torch.bfloat16", str(devices[1]), "0.2703"):
        assert part in text
    assert "\n" not in text


def test_a_payload_and_its_scale_are_needed() -> None:
    with pytest.raises(ValueError, match="needs a payload and its rowwise_scale_inv"):
        qv.Float8Tensor(None, torch.ones(1))
    with pytest.raises(ValueError, match="needs a payload"):
        qv.Float8Tensor(torch.zeros(2, 2).to(torch.float8_e4m3fn))
