"""load_quantized: what a checkpoint stores, as parameters of Quaver's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.checkpoint import load_quantized
from quaver.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from quaver.tensors import (
    Float8BlockwiseTensor,
    Float8Tensor,
    MXFP8Tensor,
    QuantizedTensor,
)
from quaver.testing import launches
from tests.checkpoint.folders import same, write

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS = 200, 300  # ragged in every block

# scales' name, shape and dtype; the block's sides; the class, its layout and its scales' shape
STORED: dict[str, tuple[Any, ...]] = {
    "blocks": ("_scale_inv", (2, 3), torch.float32, (128, 128), Float8BlockwiseTensor, "block_2d"),
    "e8m0": (
        "_scale_inv",
        (2, 3),
        torch.float8_e8m0fnu,
        (128, 128),
        Float8BlockwiseTensor,
        "block_2d",
    ),
    "row blocks": (
        "_scale_inv",
        (200, 3),
        torch.float32,
        (1, 128),
        Float8BlockwiseTensor,
        "block_1d",
    ),
    "mx": ("_scale_inv", (200, 10), torch.float8_e8m0fnu, (1, 32), MXFP8Tensor, "mx"),
    "rows": ("_scale", (200, 1), torch.float32, None, Float8BlockwiseTensor, "block_1d"),
    "rows bf16": ("_scale", (200, 1), torch.bfloat16, None, Float8BlockwiseTensor, "block_1d"),
    "rows flat": ("_scale", (200,), torch.float32, None, Float8BlockwiseTensor, "block_1d"),
    "tensor": ("_scale", (1,), torch.float32, None, Float8Tensor, "tensor"),
    "scalar": ("_scale_inv", (), torch.float32, None, Float8Tensor, "tensor"),
    "wide blocks": (
        "_scale_inv",
        (4, 2),
        torch.float32,
        (64, 256),
        Float8BlockwiseTensor,
        "block_1d",
    ),
    "small blocks": ("_scale_inv", (4, 5), torch.float32, (64, 64), None, ""),
}


class Model(nn.Module):
    """Two linear layers, one of them Quaver's, and other parameters."""

    def __init__(self, device: Any = None, recipe: Any = None) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.ours = qv.Linear(COLUMNS, ROWS, recipe=recipe, **made)
        self.plain = nn.Linear(COLUMNS, ROWS, bias=False, **made)
        self.norm = nn.LayerNorm(COLUMNS, **made)


def stored(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    suffix, shape, dtype, block, *_ = STORED[kind]
    tensors = {
        "ours.bias": torch.randn(ROWS).bfloat16(),
        "norm.weight": torch.randn(COLUMNS).bfloat16(),
        "norm.bias": torch.randn(COLUMNS).bfloat16(),
    }
    for layer in ("ours", "plain"):
        tensors[f"{layer}.weight"] = (torch.randn(ROWS, COLUMNS) * 99).to(E4M3)
        scale = torch.exp2(torch.randint(-6, 3, shape)) if shape else torch.tensor(0.25)
        tensors[f"{layer}.weight{suffix}"] = scale.to(dtype)
    quantization: dict[str, Any] = {"quant_method": "fp8"}
    if block is not None:
        quantization["weight_block_size"] = list(block)
    return tensors, {"quantization_config": quantization}


def value(tensors: dict[str, torch.Tensor], kind: str, layer: str) -> torch.Tensor:
    """What a weight stands for, in float32, independently of the package."""
    suffix, _, _, block, *_ = STORED[kind]
    data = tensors[f"{layer}.weight"].to(torch.float32)
    scale = tensors[f"{layer}.weight{suffix}"].to(torch.float32)
    if block is not None:
        for dim, side in enumerate(block):
            scale = scale.repeat_interleave(side, dim)
        scale = scale[:ROWS, :COLUMNS]
    elif scale.numel() > 1:
        scale = scale.reshape(ROWS, 1)
    return data * scale


PLACES = [(kind, where) for kind in STORED for where in ("cpu", "meta")]
PLACES += [(kind, "accelerator") for kind in ("blocks", "rows", "small blocks")]


@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_each_way_of_storing(
    kind: str, where: str, tmp_path: Path, devices: list[torch.device]
) -> None:
    device = devices[1] if where == "accelerator" else torch.device(where)
    *_, cls, layout = STORED[kind]
    tensors, config = stored(kind)
    write(tmp_path, tensors, config)
    model = Model(device)
    model.ours.weight.requires_grad_(False)
    with launches() as log:
        report = load_quantized(model, tmp_path)
    assert not log  # payloads are taken as they are
    target = torch.device("cpu") if where == "meta" else device
    assert {parameter.device for parameter in model.parameters()} == {target}
    weight = model.ours.weight
    assert weight.dtype == torch.bfloat16
    assert not weight.requires_grad
    expected = value(tensors, kind, "ours").bfloat16()
    if cls is None:
        assert not isinstance(weight, QuantizedTensor)
        assert same(weight.detach().cpu(), expected)
        assert "64×64" in dict(report.dequantized)["ours.weight"]
    else:
        assert type(weight) is cls
        assert weight.payload_layout == layout
        assert same(weight.rowwise_data.cpu(), tensors["ours.weight"])
        assert same(weight.dequantize().cpu(), expected)
        assert report.quantized == (("ours.weight", cls.__name__),)
    assert same(model.plain.weight.detach().cpu(), value(tensors, kind, "plain").bfloat16())
    assert "a Linear is not one of Quaver's" in dict(report.dequantized)["plain.weight"]
    assert same(model.ours.bias.detach().cpu(), tensors["ours.bias"])
    assert same(model.norm.weight.detach().cpu(), tensors["norm.weight"])


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor", "mx"])
@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()]
)
def test_the_layer_computes_with_it(kind: str, recipe: Any, tmp_path: Path) -> None:
    tensors, config = stored(kind)
    write(tmp_path, tensors, config)
    model = Model(recipe=recipe)
    load_quantized(model, tmp_path)
    x = torch.randn(4, COLUMNS).bfloat16()
    with torch.no_grad(), qv.autocast(enabled=False):
        exact = model.ours(x)
    expected = nn.functional.linear(x, value(tensors, kind, "ours").bfloat16(), model.ours.bias)
    assert torch.equal(exact, expected)
    with qv.autocast(recipe=recipe):
        y = model.ours(x.requires_grad_())
    assert (y - expected).norm() < 0.05 * expected.norm()
    y.sum().backward()
    assert model.ours.weight.grad.shape == (ROWS, COLUMNS)


def test_static_input_scales_are_the_inputs_scales(
    tmp_path: Path, devices: list[torch.device]
) -> None:
    tensors, config = stored("tensor")
    tensors["ours.input_scale"] = torch.tensor([0.125])
    tensors["plain.input_scale"] = torch.tensor([0.25])
    write(tmp_path, tensors, config)
    model = Model(devices[1], DelayedScaling(amax_history_len=4))
    report = load_quantized(model, tmp_path)
    assert report.static_inputs == ("ours",)
    assert "1 layers, such as plain" in report.notes[0]
    state = model.ours.recipe_states["forward"]
    assert state.device == devices[1]
    x = torch.full((2, COLUMNS), 3.0, device=devices[1]).bfloat16()
    with torch.no_grad(), qv.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model.ours(x)
    assert state.scale[0].item() == 8.0  # not taken from x
    assert not state.unset[0]
    with qv.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model.ours(x)
    assert state.scale[0].item() == 8.0  # its amax, 56, is the largest of the history still
    current = Model(recipe=Float8CurrentScaling())
    report = load_quantized(current, tmp_path)
    assert report.static_inputs == ()
    assert "no use" in str(report)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours = qv.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
            self.again = qv.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
            self.again.weight = self.ours.weight

    tensors, config = stored("blocks")
    mine = {name: value for name, value in tensors.items() if name.startswith("ours.weight")}
    write(tmp_path, mine, config)
    model = Tied()
    load_quantized(model, tmp_path)
    assert model.again.weight is model.ours.weight
    assert isinstance(model.again.weight, Float8BlockwiseTensor)


def test_a_model_without_quantization_is_loaded_too(tmp_path: Path) -> None:
    model, other = Model(), Model()
    state = {name: v for name, v in other.state_dict().items() if "_extra" not in name}
    write(tmp_path, state, shards=2)
    report = load_quantized(model, tmp_path)
    assert report.quantized == report.dequantized == ()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("norm.bias"), "lacks norm.bias"),
        (lambda t: t.update(extra=torch.ones(1)), "no place for extra"),
        (lambda t: t.update({"norm.bias": torch.ones(7)}), r"norm.bias must be of shape \[300\]"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(change, says: str, tmp_path: Path) -> None:
    tensors, config = stored("blocks")
    change(tensors)
    write(tmp_path, tensors, config)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(qv.CheckpointError, match=says):
        load_quantized(model, tmp_path)
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
