"""What torch's operations do with the tensors of every format."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from quaver.kernels.scaled_mm.layouts import operand_values
from quaver.tensors import Float8BlockwiseTensor, MXFP8Tensor, NVFP4Tensor, Quantized
from quaver.testing import launches
from tests.samples import normal
from tests.tensors.formats import BLOCKS, LOSSLESS, QUANTIZERS, is_kind, make, same_parts

every = pytest.mark.parametrize("name", QUANTIZERS)
blocks = pytest.mark.parametrize("name", BLOCKS)
USAGES = [
    {"rowwise": True, "columnwise": True},
    {"rowwise": True, "columnwise": False},
    {"rowwise": False, "columnwise": True},
]
usages = pytest.mark.parametrize("usage", USAGES, ids=lambda u: "".join(k[0] for k in u if u[k]))


def valued(operand, width: int) -> torch.Tensor:
    data, scale_inv, layout, top = operand
    return operand_values(data, scale_inv, layout, top)[:, :width]


# ---- parts and values


def test_shapes_of_the_parts() -> None:
    shapes = {
        "block_1d": [(30, 70), (30, 1), (70, 30), (70, 1)],
        "block_2d": [(30, 70), (1, 1), (70, 30), (1, 1)],
        "mx": [(30, 70), (30, 3), (70, 30), (70, 1)],
        "nvfp4": [(30, 35), (30, 5), (1,), (70, 15), (70, 2), (1,)],
        "nvfp4_2d": [(30, 35), (2, 5), (1,), (70, 15), (5, 2), (1,)],
        "nvfp4_rht": [(30, 35), (30, 5), (1,), (70, 16), (70, 2), (1,)],
    }
    for name, expected in shapes.items():
        t = make(name, 5, 6, 70)
        assert [tuple(part.shape) for part in t.parts().values()] == expected
        assert (t.shape, t.dtype) == ((5, 6, 70), torch.float32)
        if t.format == "E2M1":
            assert torch.equal(t.global_scale_inv, t.rowwise_global_scale_inv)


@usages
@every
def test_values_come_from_what_it_holds(name: str, usage) -> None:
    t, x = make(name, 5, 6, 70, **usage), normal(5, 6, 70, name="formats")
    row, col = t.operands()
    assert ((row is not None), (col is not None)) == tuple(usage.values())
    d = t.dequantize()
    assert (type(d), d.shape, d.dtype) == (torch.Tensor, x.shape, x.dtype)
    bound = {"E4M3": 2**-4, "E5M2": 2**-3, "E2M1": 2**-2}[t.format]
    assert ((d - x).norm() / x.norm()).item() < bound
    if row is not None:
        assert torch.equal(d.view(30, 70), valued(row, 70))
    elif not t.hadamard:
        assert torch.equal(d.view(30, 70), valued(col, 30).t())
    assert torch.equal(t.dequantize(torch.bfloat16), t.float().bfloat16())


def test_the_hadamard_transform_is_undone() -> None:
    x = normal(30, 70, name="formats")
    t = make("nvfp4_rht", 30, 70, rowwise=False)
    assert (t.dequantize() - x).norm() < 0.2 * x.norm()
    transformed = valued(t.operands().columnwise, 30).t()
    assert (transformed - x).norm() > x.norm()


@usages
@every
def test_operands_for_products_are_there_or_made(name: str, usage) -> None:
    t = make(name, 30, 70, **usage)
    row, col = t.quantized()
    assert t.quantized(columnwise=False).columnwise is None
    if t.rowwise_data is not None:
        assert torch.equal(valued(row, 70), t.dequantize())
    if name in LOSSLESS:
        assert torch.equal(valued(row, 70), t.dequantize())
        assert torch.equal(valued(col, 30), t.dequantize().t())
    elif not usage["columnwise"]:
        anew = t.quantizer.quantize(t.dequantize(), False, True).columnwise
        assert torch.equal(valued(col, 30), valued(anew, 30))


@every
def test_it_runs_where_it_lies_while_another_device_is_current(devices, name: str) -> None:
    here = make(name, 30, 70)
    with launches() as log:
        t = make(name, 30, 70, device=devices[1])
        d = t.dequantize()
        t.mul_(2)
    assert {(entry.device, entry.current) for entry in log} == {(devices[1], devices[1])}
    assert torch.accelerator.current_device_index() == 0
    assert all(part.device == devices[1] for part in (*t.parts().values(), d))
    assert torch.equal(d.cpu(), here.dequantize())
    moved = here.to(devices[1])
    assert moved.device == devices[1]
    assert same_parts(moved, here)
    assert same_parts(moved.cpu(), here)


# ---- what keeps it quantized


@usages
@every
def test_copies_share_or_do_not(name: str, usage) -> None:
    t = make(name, 30, 70, **usage)
    for twin in (t.detach(), t.clone(), copy.deepcopy(t), t.to(torch.bfloat16), type(t)(t)):
        assert is_kind(twin, t)
        assert same_parts(twin, t)
    assert t.detach().data_ptr() == t.data_ptr() == type(t)(t).data_ptr()
    assert t.clone().data_ptr() != t.data_ptr() != copy.deepcopy(t).data_ptr()
    assert t.to(torch.bfloat16).dequantize().dtype == torch.bfloat16
    fresh = torch.empty_like(t)
    assert is_kind(fresh, t)
    assert fresh.parts().keys() == t.parts().keys()


@every
def test_equal(name: str) -> None:
    t = make(name, 30, 70)
    other = t.clone()
    assert torch.equal(t, other)
    with torch.no_grad():
        other.mul_(3)
    assert not torch.equal(t, other)
    assert torch.equal(t, t.dequantize())


@blocks
def test_views_that_keep_whole_rows_and_blocks(name: str) -> None:
    t = make(name, 2, 128, 70)
    x = t.dequantize()
    for view, expected in [
        (t.view(256, 70), x.view(256, 70)),
        (t.view(4, 64, 70), x.view(4, 64, 70)),
        (t.view(-1), x.view(-1)),
        (t.view(-1).view(256, 70), x.view(256, 70)),
        (t.unsqueeze(0), x.unsqueeze(0)),
        (t[1], x[1]),
        (t[0:1], x[0:1]),
        (t.view(256, 70)[128:], x.view(256, 70)[128:]),
        (t.view(256, 70).chunk(2)[1], x[1]),
        (t.view(256, 70).t(), x.view(256, 70).t()),
        (t.view(256, 70).t().t(), x.view(256, 70)),
        (t.view(256, 70).transpose(0, 1), x.view(256, 70).t()),
        (t.view(256, 70).permute(0, 1), x.view(256, 70)),
    ]:
        assert is_kind(view, t)
        assert view.shape == expected.shape
        assert torch.equal(view.dequantize(), expected)
    run = t[1]
    assert run.columnwise_data is not None
    again = t.view(256, 70)[128:].quantized().columnwise
    assert torch.equal(again.data.view(torch.uint8), run.columnwise_data.view(torch.uint8))


@pytest.mark.parametrize("name", ["block_1d", "mx", "nvfp4", "nvfp4_rht"])
def test_a_run_of_rows_drops_a_copy_whose_blocks_it_cuts(name: str) -> None:
    t = make(name, 30, 70)
    for view, expected in [(t[3], t.dequantize()[3]), (t[4:9], t.dequantize()[4:9])]:
        assert view.columnwise_data is None
        assert torch.equal(view.dequantize(), expected)


@blocks
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 1:3],
        lambda t: t[0, 0],
        lambda t: t.view(70, 30),
        lambda t: t.view(3, 10, 70).transpose(0, 1),
        lambda t: t[::2],
        lambda t: t.expand(2, 30, 70),
    ],
    ids=["columns", "element", "reshaped", "turned", "strided", "expanded"],
)
def test_other_views_are_refused(name: str, view) -> None:
    with pytest.raises(NotImplementedError, match=r"call it on `.dequantize\(\)`"):
        view(make(name, 30, 70))


@pytest.mark.parametrize("name", ["block_2d", "nvfp4_2d"])
def test_rows_are_not_taken_out_of_square_blocks(name: str) -> None:
    with pytest.raises(NotImplementedError, match="whole blocks"):
        make(name, 300, 70)[3]


@blocks
def test_a_piece_is_not_written_to_but_a_whole_view_is(name: str) -> None:
    t = make(name, 256, 70)
    before = t.clone()
    for piece in (t[128:], t[128:].detach(), t.t()):
        with pytest.raises(NotImplementedError, match="cannot be written to"):
            piece.zero_()
    assert same_parts(t, before)
    t.view(2, 128, 70).mul_(2)
    assert same_parts(t, t.quantizer(before.dequantize() * 2))


# ---- writing to it, reading it


@usages
@every
def test_writing_requantizes_with_the_quantizer(name: str, usage) -> None:
    t, x = make(name, 30, 70, **usage), normal(30, 70, name="new")
    pointer = t.data_ptr()
    assert t.copy_(x) is t
    assert same_parts(t, t.quantizer(x))
    d = t.dequantize()
    assert t.add_(0.3, alpha=2) is t
    assert same_parts(t, t.quantizer(d + 0.6))
    torch.mul(x, 3, out=t)
    assert same_parts(t, t.quantizer(x * 3))
    torch._foreach_mul_([t], 0.0)
    assert not t.dequantize().any()
    assert t.data_ptr() == pointer


@every
def test_copying_takes_the_bytes(name: str) -> None:
    t, source = make(name, 30, 70), make(name, 30, 70)
    source.mul_(-3)
    t.copy_(source)
    assert same_parts(t, source)
    rows = make(name, 30, 70, columnwise=False)
    t.copy_(rows)
    assert torch.equal(t.dequantize(), rows.dequantize())
    anew = t.quantizer.quantize(rows.dequantize(), False, True).columnwise
    if name not in LOSSLESS:
        assert torch.equal(t.columnwise_data.view(torch.uint8), anew.data.view(torch.uint8))
    t.copy_(make("float8", 30, 70))
    assert same_parts(t, t.quantizer(make("float8", 30, 70).dequantize()))


@every
def test_reading_and_refusing(name: str) -> None:
    t, x = make(name, 30, 70), normal(30, 70, name="other")
    d = t.dequantize()
    rows = torch.tensor([1, 5])
    for got, expected in [
        (t + x, d + x),
        (x @ t.t(), x @ d.t()),
        (nn.functional.linear(x, t), nn.functional.linear(x, d)),
        (t[rows], d[rows]),
        (t[d > 0], d[d > 0]),
        (t.abs().sum(), d.abs().sum()),
        (torch.zeros_like(t), torch.zeros_like(d)),
    ]:
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)
    with pytest.raises(NotImplementedError, match=r"call it on `.dequantize\(\)`"):
        torch.sort(t)
    text = repr(t)
    assert "\n" not in text
    assert all(
        part in text for part in (type(t).__name__, t.format, "(30, 70)", "scale_inv=", "cpu")
    )


def test_a_transformed_copy_alone_has_no_transpose() -> None:
    with pytest.raises(NotImplementedError, match="rowwise=True"):
        make("nvfp4_rht", 30, 70, rowwise=False).t()


# ---- making and saving


@usages
@every
@pytest.mark.parametrize("way", ["weights_only", "pickle"])
def test_files(name: str, usage, way: str) -> None:
    t = nn.Parameter(make(name, 5, 6, 70, dtype=torch.bfloat16, **usage))
    if way == "pickle":
        back = pickle.loads(pickle.dumps(t))
    else:
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        back = torch.load(file, weights_only=True)
    assert isinstance(back, nn.Parameter)
    assert is_kind(back, t)
    assert (back.shape, back.dtype, back.requires_grad) == (t.shape, torch.bfloat16, True)
    assert same_parts(back, t)
    assert torch.equal(back.dequantize(), t.dequantize())
    assert back.quantizer is None


@pytest.mark.parametrize("name", ["float8", "mx", "nvfp4", "nvfp4_2d", "nvfp4_rht"])
def test_without_a_quantizer_the_class_quantizes_as_by_default(name: str) -> None:
    t = pickle.loads(pickle.dumps(make(name, 30, 70)))
    x = normal(30, 70, name="new")
    t.copy_(x)
    assert same_parts(t, QUANTIZERS[name]()(x))


@every
def test_flatten_and_back(name: str) -> None:
    t = make(name, 5, 6, 70)
    names, meta = t.__tensor_flatten__()
    inner = {part: getattr(t, part) for part in names}
    back = type(t).__tensor_unflatten__(inner, meta, t.shape, t.stride())
    assert is_kind(back, t)
    assert same_parts(back, t)
    assert back.quantizer is t.quantizer


@every
def test_a_compiled_function_reads_it_and_sees_it_change(name: str) -> None:
    weight = nn.Parameter(make(name, 30, 70))
    x = normal(4, 70, name="x")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ weight.dequantize().t()

    for _ in range(2):
        assert torch.equal(product(x), x @ weight.dequantize().t())
        with torch.no_grad():
            weight.mul_(-2)


@every
def test_meta_and_back(devices, name: str) -> None:
    module = nn.Linear(70, 30, bias=False)
    module.weight = nn.Parameter(make(name, 30, 70))
    module.to("meta").to_empty(device=devices[1])
    assert module.weight.device == module.weight.rowwise_data.device == devices[1]
    x = normal(30, 70, name="new")
    with torch.no_grad():
        module.weight.copy_(x)
    assert same_parts(module.weight, QUANTIZERS[name]()(x))


def test_what_the_constructors_refuse() -> None:
    mx = make("mx", 30, 70)
    for cls in (Float8BlockwiseTensor, MXFP8Tensor, NVFP4Tensor):
        with pytest.raises(ValueError, match="at least one operand"):
            cls(Quantized(None, None), shape=mx.shape)
        with pytest.raises(ValueError, match="at least one operand, not Tensor"):
            cls(torch.ones(2), requires_grad=False)
    with pytest.raises(ValueError, match="must have the layout nvfp4 or nvfp4_2d, not mx"):
        NVFP4Tensor(mx.operands(), shape=mx.shape)
    with pytest.raises(ValueError, match="needs the shape"):
        MXFP8Tensor(mx.operands())
