"""Checkpoints that are damaged or foreign: one clear line, and nothing written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.checkpoint import convert_checkpoint, load_quantized
from tests.checkpoint.folders import LAYERS, SHAPES, config_of, read, weights, write

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT = f"{LAYERS[0]}.weight"
SCALE = f"{WEIGHT}_scale_inv"


def quantized() -> dict[str, torch.Tensor]:
    """As a finegrained FP8 checkpoint holds them."""
    tensors = weights()
    for layer, shape in SHAPES.items():
        tensors[f"{layer}.weight"] = (torch.randn(shape) * 99).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale_inv"] = torch.rand(shape[0] // 128, shape[1] // 128) + 0.5
    return tensors


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def changed(**values: Any) -> Callable[[Path], None]:
    """A checkpoint with some tensors replaced; None takes one out."""

    def write_changed(folder: Path) -> None:
        tensors = quantized()
        for key, value in values.items():
            name = {"scale": SCALE, "weight": WEIGHT, "input": f"{LAYERS[0]}.input_scale"}.get(
                key, f"{LAYERS[0]}.{key}"
            )
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        write(folder, tensors, FP8, shards=3)

    return write_changed


def sharded(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def write_sharded(folder: Path) -> None:
        write(folder, quantized(), FP8, shards=3)
        change(folder)

    return write_sharded


def map_to(file: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"][WEIGHT] = file
        (folder / INDEX).write_text(json.dumps(content))

    return sharded(change)


def config(**quantization: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, quantized(), {"quantization_config": quantization})  # type: ignore[return-value]


def truncate(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-100])


def scales(value: float) -> torch.Tensor:
    return torch.tensor([[1.0], [value]])


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: None, "must be a folder"),
    "an empty folder": (lambda folder: folder.mkdir(), "has neither"),
    "a truncated shard": (sharded(truncate), f"{SHARD} is cut short"),
    "an empty shard": (sharded(lambda f: (f / SHARD).write_bytes(b"")), "cut short or damaged"),
    "a shard of text": (sharded(lambda f: (f / SHARD).write_text("x" * 99)), "damaged"),
    "a shard missing": (sharded(lambda f: (f / SHARD).unlink()), "lacks 1 of the 3 files"),
    "a shard of another": (
        sharded(lambda f: (f / SHARD).write_bytes((f / SHARD.replace("2-", "1-")).read_bytes())),
        "do not hold",
    ),
    "an index outside": (map_to("../model.safetensors"), "own folder"),
    "an absolute index": (map_to("/etc/model.safetensors"), "own folder"),
    "an index to a folder": (map_to(".."), "own folder"),
    "an index of numbers": (map_to(3), "own folder"),
    "an index of another type": (map_to("model.bin"), "own folder"),
    "an index cut short": (
        sharded(lambda f: (f / INDEX).write_text('{"weight_map": {')),
        "cannot be read as JSON",
    ),
    "an empty index": (sharded(lambda f: (f / INDEX).write_text("{}")), "weight_map"),
    "a list as config": (sharded(lambda f: (f / "config.json").write_text("[]")), "JSON object"),
    "a scale of NaN": (
        changed(scale=scales(torch.nan)),
        "finite scales of at least 0, but has nan",
    ),
    "a scale of inf": (changed(scale=scales(torch.inf)), "but has inf"),
    "a negative scale": (changed(scale=scales(-1.0)), "but has -1.0"),
    "an E8M0 scale of NaN": (
        changed(scale=torch.tensor([[127], [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        "but has nan",
    ),
    "a scale of integers": (changed(scale=torch.ones(2, 1).int()), "floating-point"),
    "no scale": (changed(scale=None), "found 0 scales"),
    "two scales": (changed(weight_scale=torch.ones(1)), "found 2 scales"),
    "a zero point": (changed(weight_zero_point=torch.ones(1)), "no zero point"),
    "scales of another shape": (changed(scale=torch.ones(2, 2)), r"must be of shape \[2, 1\]"),
    "scales turned": (changed(scale=torch.ones(1, 2)), r"not \[1, 2\]"),
    "an input scale of two": (changed(input=torch.ones(2)), "one positive scale"),
    "an input scale of 0": (changed(input=torch.zeros(1)), "one positive scale"),
    "FP8 of three dimensions": (
        changed(weight=torch.ones(2, 128, 128).to(torch.float8_e4m3fn)),
        "two-dimensional",
    ),
    "another method": (config(quant_method="awq"), "'awq'"),
    "4 bits": (
        config(
            quant_method="compressed-tensors",
            config_groups={"g": {"weights": {"num_bits": 4, "type": "int"}}},
        ),
        "4-bit int",
    ),
    "blocks of two sizes": (
        config(
            quant_method="fp8",
            weight_block_size=[128, 128],
            config_groups={
                "g": {"weights": {"num_bits": 8, "type": "float", "block_structure": [64, 64]}}
            },
        ),
        "several sizes",
    ),
    "a block of no size": (config(quant_method="fp8", weight_block_size=[0, 128]), "two sides"),
}


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = qv.Linear(128, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_one_line_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    make, says = DAMAGED[kind]
    make(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    model = Up()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for act in (
        lambda: convert_checkpoint(tmp_path / "source", tmp_path / "out", format="dequantized"),
        lambda: load_quantized(model, tmp_path / "source"),
    ):
        with pytest.raises(qv.CheckpointError, match=says) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert sorted(tmp_path.rglob("*")) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_sound_one_is_taken(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    changed()(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", format="dequantized")
    before, after = quantized(), read(tmp_path / "out")
    assert set(after) == {name for name in before if not name.endswith("_scale_inv")}


def test_weights_that_are_not_finite_leave_nothing_behind(tmp_path: Path) -> None:
    tensors = weights()
    tensors[f"{LAYERS[2]}.weight"][3, 5] = torch.inf
    source = write(tmp_path / "source", tensors, shards=3)
    with pytest.raises(qv.CheckpointError, match=f"{LAYERS[2]}.weight holds NaN or inf"):
        convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8")
    assert not (tmp_path / "out").exists()
    convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8", exclude=["*down*"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "Conv1D"),
        (None, "config.json"),
    ],
)
def test_models_that_do_not_fit_the_formats(change: Any, says: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights(), change or {})
    if change is None:
        (source / "config.json").unlink()
    with pytest.raises(qv.CheckpointError, match=says):
        convert_checkpoint(source, tmp_path / "out", format="finegrained-fp8")
    assert not (tmp_path / "out").exists()


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights())
    with pytest.raises(qv.CheckpointError, match="no weight that the format dequantized"):
        convert_checkpoint(source, tmp_path / "out", format="dequantized")
    with pytest.raises(qv.CheckpointError, match="no weight"):
        convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8", include=["nothing"])
    assert not (tmp_path / "out").exists()


def test_a_scale_of_a_weight_that_is_not_fp8_is_dropped_and_said(tmp_path: Path) -> None:
    """transformers writes such, with whatever was in memory."""
    tensors = quantized() | {"lm_head.weight_scale_inv": torch.full((1, 1), torch.nan)}
    source = write(tmp_path / "source", tensors, FP8)
    report = convert_checkpoint(source, tmp_path / "out", format="compressed-tensors")
    assert report.notes == ("1 scales of weights that are not FP8 are dropped",)
    assert "lm_head.weight_scale_inv" not in read(tmp_path / "out")
    assert "lm_head" in config_of(tmp_path / "out")["quantization_config"]["ignore"]


def test_a_file_as_destination_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights())
    (tmp_path / "out").write_text("mine")
    with pytest.raises(qv.CheckpointError, match="is a file"):
        convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8", force=True)
    assert (tmp_path / "out").read_text() == "mine"
