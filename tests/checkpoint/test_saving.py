"""save_model and load_model: quantized parameters through plain safetensors files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quaver as qv
from quaver.checkpoint import flatten_state, load_model, load_quantized, save_model, unflatten_state
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from quaver.tensors import QuantizedTensor
from tests.checkpoint.folders import same

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "block 1d": Float8BlockScaling(w_block_scaling_dim=1),
    "mx": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
# what lies beside weight, for a parameter that is trained and so may have a second copy
PARTS = {
    "delayed": {"_scale_inv"},
    "current": {"_scale_inv"},
    "block": {"_scale_inv"},
    "block 1d": {"_scale_inv", "_columnwise", "_columnwise_scale_inv"},
    "mx": {"_scale_inv", "_columnwise", "_columnwise_scale_inv"},
    "nvfp4": {"_scale_inv", "_global_scale_inv"},
}

Devices = list[torch.device]


class Model(nn.Module):
    """Two layers of ours on their devices, one of torch's, one tied."""

    def __init__(self, recipe: Recipe | None, places: list[Any], quantize: bool = True) -> None:
        super().__init__()
        with qv.quantized_model_init(enabled=quantize, recipe=recipe):
            self.first = qv.Linear(40, 48, device=places[0], recipe=recipe)
            self.second = qv.Linear(48, 40, device=places[1], recipe=recipe)
        self.head = nn.Linear(40, 8, bias=False, device=places[1])
        self.embed = nn.Embedding(8, 40, device=places[1])
        self.embed.weight = self.head.weight
        self.again = qv.Linear(48, 40, bias=False, device=places[1], recipe=recipe)
        self.again.weight = self.second.weight
        self.register_buffer("mean", torch.randn(3, device=places[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).to(self.head.weight.device)
        return self.head(self.second(hidden) + self.again(hidden))


def trained(recipe: Recipe, places: list[Any]) -> Model:
    model = Model(recipe, places)
    for _ in range(2):
        with qv.autocast(recipe=recipe):
            y = model(torch.randn(8, 40, device=places[0]))
        y.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, device=parameter.device), alpha=0.01)
    model.zero_grad()
    return model


def assert_equal(model: Model, other: Model) -> None:
    """Equal bit for bit, quantized parameters part by part; tied where the other is."""
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, QuantizedTensor):
            assert type(value) is type(theirs[name])
            parts = value.parts(), theirs[name].parts()
            assert parts[0].keys() == parts[1].keys()
            assert all(same(parts[0][part].cpu(), parts[1][part].cpu()) for part in parts[0])
            assert value.frame()._replace(quantizer=None) == theirs[name].frame()._replace(
                quantizer=None
            )
        else:
            assert same(value.cpu(), theirs[name].cpu()), name
    assert model.embed.weight is model.head.weight
    assert model.again.weight is model.second.weight


@pytest.mark.parametrize("kind", RECIPES)
def test_bit_for_bit_from_two_devices_onto_others(
    kind: str, tmp_path: Path, devices: Devices
) -> None:
    recipe = RECIPES[kind]
    source = trained(recipe, devices)
    save_model(source, tmp_path)
    x = torch.randn(4, 40)
    with torch.no_grad(), qv.autocast(recipe=recipe):
        expected = source(x.to(devices[0])).cpu()
    for places in ([devices[0], devices[0]], [torch.device("cpu")] * 2, devices[::-1]):
        model = Model(recipe, places)
        load_model(model, tmp_path)
        assert_equal(model, source)
        assert model.first.weight.device == places[0]
        assert model.second.weight.quantizer is not None
        assert model.second.weight.requires_grad
        with torch.no_grad(), qv.autocast(recipe=recipe):
            y = model(x.to(places[0])).cpu()
        if places[0].type == devices[0].type or devices[0].type == "sim":
            assert torch.equal(y, expected)
        else:  # a GPU sums in another order, and what is cast next may fall to a neighbour;
            # the bound of a layer is derived in tests/gpu/test_checkpoint_cuda.py
            assert (y - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("kind", RECIPES)
def test_what_was_loaded_can_be_trained_and_saved_again(kind: str, tmp_path: Path) -> None:
    recipe = RECIPES[kind]
    save_model(trained(recipe, ["cpu", "cpu"]), tmp_path)
    before = load_file(tmp_path / "model.safetensors")["first.weight"].view(torch.uint8).clone()
    model = Model(recipe, ["cpu", "cpu"])
    load_model(model, tmp_path)
    with qv.autocast(recipe=recipe):
        model(torch.randn(8, 40)).sum().backward()
    with torch.no_grad():
        model.first.weight.add_(torch.randn(48, 40))
    again = load_file(tmp_path / "model.safetensors")["first.weight"].view(torch.uint8)
    assert torch.equal(again, before)  # the file is not what is written to
    save_model(model, tmp_path)
    other = Model(recipe, ["cpu", "cpu"])
    load_model(other, tmp_path)
    assert_equal(other, model)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_file_holds_plain_tensors_by_name(kind: str, tmp_path: Path) -> None:
    source = trained(RECIPES[kind], ["cpu", "cpu"])
    save_model(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    flat = load_file(tmp_path / "model.safetensors")
    names = {name for name in flat if name.startswith("first.weight")}
    assert names == {"first.weight", *(f"first.weight{part}" for part in PARTS[kind])}
    assert same(flat["first.weight"], source.first.weight.rowwise_data)
    assert same(flat["first.weight_scale_inv"], source.first.weight.rowwise_scale_inv)
    assert not any(name.startswith("again.weight") for name in flat)
    assert ("embed.weight" in flat) != ("head.weight" in flat)


@pytest.mark.parametrize("quantize", [False, True])
def test_onto_meta_and_onto_another_form(quantize: bool, tmp_path: Path) -> None:
    """A parameter is quantized afterwards if it is so in the file, whatever it was before."""
    source = trained(RECIPES["block"], ["cpu", "cpu"])
    save_model(source, tmp_path)
    for place in ("cpu", "meta"):
        model = Model(RECIPES["block"], [place, place], quantize=quantize)
        if place == "meta":
            model.mean = torch.zeros(3)
        load_model(model, tmp_path)
        assert_equal(model, source)


def test_the_package_is_reached_from_the_root() -> None:
    """nn has a function of the package's name, which must not take its place."""
    assert qv.checkpoint.save_model is save_model


def test_a_model_that_is_not_quantized(tmp_path: Path) -> None:
    source = Model(None, ["cpu", "cpu"], quantize=False)
    save_model(source, tmp_path)
    model = Model(None, ["cpu", "cpu"], quantize=False)
    load_model(model, tmp_path)
    assert_equal(model, source)


def test_several_files_with_an_index(tmp_path: Path) -> None:
    source = trained(RECIPES["mx"], ["cpu", "cpu"])
    save_model(source, tmp_path)
    save_model(source, tmp_path, max_shard_size=4000)
    names = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" not in names  # it would be read in place of the others
    assert "model.safetensors.index.json" in names
    assert len(names) > 3
    model = Model(RECIPES["mx"], ["cpu", "cpu"])
    load_model(model, tmp_path)
    assert_equal(model, source)


def test_scaling_states_come_along_and_older_files_without_them_load(tmp_path: Path) -> None:
    source = trained(RECIPES["delayed"], ["cpu", "cpu"])
    save_model(source, tmp_path)
    model = Model(RECIPES["delayed"], ["cpu", "cpu"])
    load_model(model, tmp_path)
    state = model.first.recipe_states["forward"]
    assert torch.equal(state.scale, source.first.recipe_states["forward"].scale)
    flat, metadata = flatten_state(source.state_dict())
    without = {name: value for name, value in flat.items() if "_extra_state" not in name}
    save_file(without, tmp_path / "model.safetensors", metadata=metadata)
    fresh = Model(RECIPES["delayed"], ["cpu", "cpu"])
    load_model(fresh, tmp_path)
    assert same(fresh.first.weight.rowwise_data, source.first.weight.rowwise_data)


def test_blocks_have_the_names_of_finegrained_fp8(tmp_path: Path) -> None:
    model = nn.ModuleDict({"up": qv.Linear(256, 128, bias=False, recipe=RECIPES["block"])})
    model["up"].quantize_weight()
    save_model(model, tmp_path)
    other = nn.ModuleDict({"up": qv.Linear(256, 128, bias=False, recipe=RECIPES["current"])})
    flat = load_file(tmp_path / "model.safetensors")
    flat.pop("up._extra_state")
    (tmp_path / "hf").mkdir()
    save_file(flat, tmp_path / "hf" / "model.safetensors")  # without our metadata
    load_quantized(other, tmp_path / "hf")
    assert torch.equal(other["up"].weight.dequantize(), model["up"].weight.dequantize())


def test_flat_there_and_back_keeps_devices_and_extra_keys(devices: Devices) -> None:
    state = {"w": Model(RECIPES["block"], devices).second.weight, "b": torch.ones(3)}
    flat, metadata = flatten_state(state)
    assert {value.device.type for value in flat.values()} == {"cpu"}
    assert set(flat) == {"w", "w_scale_inv", "b"}
    back = unflatten_state({n: v.to(devices[0]) for n, v in flat.items()}, metadata | {"a": "b"})
    assert back["w"].device == devices[0]
    assert torch.equal(back["w"].dequantize().cpu(), state["w"].dequantize().cpu())
    assert unflatten_state({"b": state["b"]}, None) == {"b": state["b"]}


# ---- errors


def spoil(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the tensors and the metadata of the file in a folder."""

    def act(folder: Path) -> None:
        path = folder / "model.safetensors"
        flat = load_file(path)
        with safe_open(path, "pt") as opened:
            about = json.loads(opened.metadata()["quaver"])
        change(flat, about)
        save_file(flat, path, metadata={"quaver": json.dumps(about)})

    return act


def description(**values: Any) -> Callable[[Path], None]:
    return spoil(lambda flat, about: about["quantized"]["first.weight"].update(values))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part missing": (spoil(lambda flat, _: flat.pop("first.weight_scale_inv")), "first.weight"),
    "a payload of another shape": (
        spoil(
            lambda flat, _: flat.update({"first.weight": torch.ones(9, 9).to(torch.float8_e4m3fn)})
        ),
        "first.weight",
    ),
    "scales of another shape": (
        spoil(lambda flat, _: flat.update({"first.weight_scale_inv": torch.ones(7, 9)})),
        "first.weight",
    ),
    "scales of NaN": (
        spoil(lambda flat, _: flat["first.weight_scale_inv"].fill_(torch.nan)),
        "finite",
    ),
    "another class": (description(**{"class": "Evil"}), "first.weight"),
    "another dtype": (description(dtype="load"), "first.weight"),
    "another layout": (description(layout="mx"), "first.weight"),
    "other parts": (description(parts=["__class__"]), "first.weight"),
    "no metadata": (spoil(lambda _, about: about.pop("tied")), "metadata"),
    "a tie to nothing": (spoil(lambda _, about: about["tied"].update(x="y")), "x is tied to y"),
    "tensors missing": (spoil(lambda flat, _: flat.pop("first.bias")), "lacks first.bias"),
    "tensors too many": (spoil(lambda flat, _: flat.update(x=torch.ones(1))), "no place for x"),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:-9]
        ),
        "cut short",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_one_line_and_the_model_is_as_it_was(kind: str, tmp_path: Path) -> None:
    change, says = DAMAGED[kind]
    save_model(trained(RECIPES["block"], ["cpu", "cpu"]), tmp_path)
    change(tmp_path)
    model = Model(RECIPES["block"], ["cpu", "cpu"])
    before = dict(model.named_parameters())
    values = {
        n: p.dequantize() if isinstance(p, QuantizedTensor) else p.clone()
        for n, p in before.items()
    }
    with pytest.raises(qv.CheckpointError, match=says) as caught:
        load_model(model, tmp_path)
    assert "\n" not in str(caught.value)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        plain = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(plain, values[name])


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(qv.CheckpointError, match="no values"):
        save_model(nn.Linear(2, 2, device="meta"), tmp_path)
    shard = torch.ones(1)
    shard.full_tensor = None  # as a DTensor has
    with pytest.raises(qv.CheckpointError, match="shard of this rank"):
        flatten_state({"a": shard})
    with pytest.raises(qv.CheckpointError, match="must be a tensor"):
        flatten_state({"a": 3})
    weight = Model(RECIPES["block"], ["cpu", "cpu"]).first.weight
    with pytest.raises(qv.CheckpointError, match="two tensors"):
        flatten_state({"w_scale_inv": torch.ones(1), "w": weight})
    assert not list(tmp_path.iterdir())
