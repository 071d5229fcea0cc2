"""Checkpoints on disk become FP8 ones, and back: values, names, config, and files."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import quaver as qv
from quaver.checkpoint import convert as module
from quaver.checkpoint import convert_checkpoint, files
from quaver.checkpoint.journal import JOURNAL
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.checkpoint.folders import LAYERS, SHAPES, config_of, read, same, weights, write

E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn

# format, recipe, scale_format; block (None: the tensor), scale's name and dtype
FORMATS = {
    "blocks": ("finegrained-fp8", None, None, (128, 128), "weight_scale_inv", torch.float32),
    "any float32": (
        "finegrained-fp8",
        Float8BlockScaling(use_f32_scales=True),
        None,
        (128, 128),
        "weight_scale_inv",
        torch.float32,
    ),
    "blocks e8m0": ("finegrained-fp8", None, "e8m0", (128, 128), "weight_scale_inv", E8M0),
    "rows of blocks": (
        "finegrained-fp8",
        Float8BlockScaling(w_block_scaling_dim=1),
        None,
        (1, 128),
        "weight_scale_inv",
        torch.float32,
    ),
    "mx": ("finegrained-fp8", MXFP8BlockScaling(), None, (1, 32), "weight_scale_inv", E8M0),
    "tensor": (
        "finegrained-fp8",
        Float8CurrentScaling(),
        None,
        None,
        "weight_scale_inv",
        torch.float32,
    ),
    "fbgemm": ("fbgemm-fp8", None, None, (1, 0), "weight_scale", torch.float32),
    "ct rows": ("compressed-tensors", None, None, (1, 0), "weight_scale", torch.float32),
    "ct tensor": (
        "compressed-tensors",
        DelayedScaling(),
        None,
        None,
        "weight_scale",
        torch.float32,
    ),
    "ct blocks": (
        "compressed-tensors",
        Float8BlockScaling(),
        None,
        (128, 128),
        "weight_scale",
        torch.float32,
    ),
}


def spread(scale: torch.Tensor, block: tuple[int, int] | None, shape) -> torch.Tensor:
    """A scale for each value, independently of the package."""
    if block is None:
        return scale.to(torch.float32).reshape(1, 1).expand(shape)
    height, width = block[0], block[1] or shape[1]
    assert tuple(scale.shape) == (-(-shape[0] // height), -(-shape[1] // width))
    wide = scale.to(torch.float32).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return wide[: shape[0], : shape[1]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", weights(), shards=2)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format(kind: str, source: Path, tmp_path: Path) -> None:
    format, recipe, scale_format, block, scale_name, scale_dtype = FORMATS[kind]
    before = read(source)
    report = convert_checkpoint(
        source, tmp_path / "out", format=format, recipe=recipe, scale_format=scale_format
    )
    after = read(tmp_path / "out")
    for layer, shape in SHAPES.items():
        weight = after[f"{layer}.weight"]
        scale = after[f"{layer}.{scale_name}"]
        assert (weight.dtype, weight.shape, scale.dtype) == (E4M3, shape, scale_dtype)
        value = weight.to(torch.float32) * spread(scale, block, shape)
        error = (value - before[f"{layer}.weight"].float()).abs()
        step = spread(scale, block, shape) * torch.clamp(weight.float().abs() / 16, min=2.0**-10)
        assert (error <= step * (1 + 1e-5)).all()  # half of E4M3's step, wherever it is
        assert (weight.float().abs().amax() > 200).item()  # the range is used
    kept = set(before) - {f"{layer}.weight" for layer in LAYERS}
    assert set(after) == set(before) | {f"{layer}.{scale_name}" for layer in LAYERS}
    assert all(same(after[name], before[name]) for name in kept)
    assert report.quantized == tuple(sorted(report.quantized, key=list(report.quantized).index))
    assert set(report.quantized) == {f"{layer}.weight" for layer in LAYERS}
    assert dict(report.left) == {
        "model.embed_tokens.weight": "excluded by '*embed*'",
        "lm_head.weight": "excluded by 'lm_head'",
    }
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(path.name for path in source.iterdir())
    }


def test_payload_and_scales_are_the_quantizers_own(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", format="finegrained-fp8")
    name = f"{LAYERS[2]}.weight"
    own = qv.Float8BlockQuantizer(E4M3, columnwise=False)(read(source)[name])
    after = read(tmp_path / "out")
    assert same(after[name], own.rowwise_data)
    assert same(after[f"{name}_scale_inv"], own.rowwise_scale_inv)


def test_what_config_says(source: Path, tmp_path: Path) -> None:
    said = {}
    for kind, (format, recipe, scale_format, *_) in FORMATS.items():
        out = tmp_path / kind
        convert_checkpoint(source, out, format=format, recipe=recipe, scale_format=scale_format)
        config = config_of(out)
        said[kind] = config.pop("quantization_config")
        assert config == config_of(source)
    left = ["lm_head", "model.embed_tokens"]
    assert said["blocks e8m0"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": left,
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    assert said["blocks"]["scale_fmt"] == "float"
    assert said["mx"]["weight_block_size"] == [1, 32]
    assert said["tensor"]["weight_block_size"] is None
    assert said["fbgemm"] == {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": left,
    }
    strategies = {
        kind: said[kind]["config_groups"]["group_0"]["weights"]["strategy"]
        for kind in FORMATS
        if kind.startswith("ct")
    }
    assert strategies == {"ct rows": "channel", "ct tensor": "tensor", "ct blocks": "block"}
    assert said["ct rows"]["ignore"] == left


@pytest.mark.parametrize("kind", FORMATS)
def test_there_and_back_is_what_the_payload_stands_for(
    kind: str, source: Path, tmp_path: Path
) -> None:
    format, recipe, scale_format, block, scale_name, _ = FORMATS[kind]
    out, back = tmp_path / "out", tmp_path / "back"
    convert_checkpoint(source, out, format=format, recipe=recipe, scale_format=scale_format)
    report = convert_checkpoint(out, back, format="dequantized")
    middle, after = read(out), read(back)
    assert len(report.dequantized) == len(LAYERS)
    assert "quantization_config" not in config_of(back)
    assert set(after) == set(read(source))
    for layer, shape in SHAPES.items():
        scale = spread(middle[f"{layer}.{scale_name}"], block, shape)
        value = (middle[f"{layer}.weight"].to(torch.float32) * scale).to(torch.bfloat16)
        assert same(after[f"{layer}.weight"], value)


def test_between_fp8_formats_the_payload_moves_if_the_blocks_are_the_same(
    source: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    convert_checkpoint(source, first, format="finegrained-fp8")
    moved = convert_checkpoint(first, second, format="finegrained-fp8", scale_format="e8m0")
    assert len(moved.moved) == len(LAYERS)
    again = convert_checkpoint(second, third, format="fbgemm-fp8")
    assert (again.moved, len(again.requantized)) == ((), len(LAYERS))
    for layer in LAYERS:
        one, two = read(first), read(second)
        assert same(one[f"{layer}.weight"], two[f"{layer}.weight"])
        scales = one[f"{layer}.weight_scale_inv"], two[f"{layer}.weight_scale_inv"].float()
        assert torch.equal(*scales)
        assert f"{layer}.weight_scale_inv" not in read(third)
    assert config_of(third)["quantization_config"]["quant_method"] == "fbgemm_fp8"


def test_scales_that_are_no_powers_of_two_do_not_move_to_e8m0(source: Path, tmp_path: Path) -> None:
    recipe = Float8BlockScaling(use_f32_scales=True)
    convert_checkpoint(source, tmp_path / "f32", format="finegrained-fp8", recipe=recipe)
    report = convert_checkpoint(
        tmp_path / "f32", tmp_path / "e8m0", format="finegrained-fp8", scale_format="e8m0"
    )
    assert len(report.requantized) == len(LAYERS)


def test_ragged_layers_are_left_and_named(tmp_path: Path) -> None:
    tensors = weights() | {"model.ragged.weight": torch.randn(200, 128)}
    source = write(tmp_path / "source", tensors)
    report = convert_checkpoint(source, tmp_path / "out", format="finegrained-fp8")
    assert "128 does not divide 200" in dict(report.left)["model.ragged.weight"]
    quantization = config_of(tmp_path / "out")["quantization_config"]
    assert "model.ragged" in quantization["modules_to_not_convert"]
    assert read(tmp_path / "out")["model.ragged.weight"].dtype == torch.float32
    rows = convert_checkpoint(source, tmp_path / "rows", format="fbgemm-fp8")
    assert "model.ragged.weight" in rows.quantized


def test_include_and_exclude(source: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(
        source,
        tmp_path / "out",
        format="fbgemm-fp8",
        include=["model.layers.1.*", "nothing"],
        exclude=["*.down_proj"],
    )
    assert report.quantized == (f"{LAYERS[1]}.weight",)
    assert dict(report.left)[f"{LAYERS[2]}.weight"] == "excluded by '*.down_proj'"
    assert dict(report.left)["lm_head.weight"] == "not among include"
    assert report.notes == ("the pattern 'nothing' matches no layer",)
    assert "'nothing' matches no layer" in str(report)
    assert "2 left" not in str(report).split("excluded by")[0]


def test_layers_of_an_fp8_source_can_be_left_too(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "fp8", format="finegrained-fp8")
    report = convert_checkpoint(
        tmp_path / "fp8", tmp_path / "out", format="finegrained-fp8", exclude=["*.down_proj"]
    )
    assert report.dequantized == (f"{LAYERS[2]}.weight",)
    assert set(report.moved) == {f"{layer}.weight" for layer in LAYERS[:2]}
    assert "excluded by '*.down_proj'" in dict(report.left)[f"{LAYERS[2]}.weight"]
    assert read(tmp_path / "out")[f"{LAYERS[2]}.weight"].dtype == torch.bfloat16
    said = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert LAYERS[2] in said
    with pytest.raises(qv.CheckpointError, match="takes neither"):
        convert_checkpoint(
            tmp_path / "fp8", tmp_path / "no", format="dequantized", include=["*.down_proj"]
        )


@pytest.mark.parametrize("format", ["finegrained-fp8", "compressed-tensors"])
def test_static_input_scales(format: str, source: Path, tmp_path: Path) -> None:
    scales = {layer: 0.5 + i for i, layer in enumerate(LAYERS)}
    convert_checkpoint(
        source,
        tmp_path / "out",
        format=format,
        static_scales=scales | {"lm_head": 1.0},
    )
    after = read(tmp_path / "out")
    name = "activation_scale" if format == "finegrained-fp8" else "input_scale"
    assert {layer: after[f"{layer}.{name}"].item() for layer in LAYERS} == scales
    assert f"lm_head.{name}" not in after
    quantization = config_of(tmp_path / "out")["quantization_config"]
    if format == "finegrained-fp8":
        assert quantization["activation_scheme"] == "static"
    else:
        inputs = quantization["config_groups"]["group_0"]["input_activations"]
        assert (inputs["dynamic"], inputs["strategy"]) == (False, "tensor")
    again = convert_checkpoint(tmp_path / "out", tmp_path / "2", format="compressed-tensors")
    assert read(tmp_path / "2")[f"{LAYERS[0]}.input_scale"].item() == 0.5
    assert not again.notes
    dropped = convert_checkpoint(tmp_path / "out", tmp_path / "3", format="fbgemm-fp8")
    assert "input scales are dropped" in dropped.notes[0]


def test_static_scales_must_be_complete_and_have_a_place(source: Path, tmp_path: Path) -> None:
    with pytest.raises(qv.CheckpointError, match="2 have none"):
        convert_checkpoint(
            source, tmp_path / "o", format="compressed-tensors", static_scales={LAYERS[0]: 1.0}
        )
    with pytest.raises(qv.CheckpointError, match="no static input scales"):
        convert_checkpoint(
            source, tmp_path / "o", format="fbgemm-fp8", static_scales=dict.fromkeys(LAYERS, 1.0)
        )
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "awq"}, "format must be one of"),
        ({"format": "finegrained-fp8", "recipe": NVFP4BlockScaling()}, "NVFP4BlockScaling"),
        ({"format": "fbgemm-fp8", "recipe": Float8BlockScaling()}, "no recipe at all"),
        ({"format": "compressed-tensors", "recipe": MXFP8BlockScaling()}, "MXFP8BlockScaling"),
        (
            {"format": "compressed-tensors", "recipe": Float8BlockScaling(w_block_scaling_dim=1)},
            "128×128",
        ),
        ({"format": "fbgemm-fp8", "scale_format": "e8m0"}, "powers of two"),
        (
            {
                "format": "finegrained-fp8",
                "recipe": Float8BlockScaling(use_f32_scales=True),
                "scale_format": "e8m0",
            },
            "powers of two",
        ),
        ({"format": "finegrained-fp8", "scale_format": "fp16"}, "scale_format must be"),
        (
            {
                "format": "finegrained-fp8",
                "recipe": MXFP8BlockScaling(),
                "scale_format": "float32",
            },
            "leave scale_format away",
        ),
    ],
)
def test_choices_that_do_not_fit(options, says: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(qv.RecipeError, match=says):
        convert_checkpoint(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# ---- files


class Killed(BaseException):
    """As a signal would: no handler of the package catches it."""


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let the process die in the middle of writing file number `count`; lists the files begun."""
    begun: list[str] = []
    real = files.save_file

    def save(tensors, path, metadata) -> None:
        begun.append(Path(path).name)
        if len(begun) == count:
            Path(path).write_bytes(b"half")
            raise Killed
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(files, "save_file", save)
    return begun


def test_a_stopped_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "source", weights(), shards=3), tmp_path / "out"
    begun = stop_at(monkeypatch, 2)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # as a kill -9 would
    with pytest.raises(Killed):
        convert_checkpoint(source, out, format="finegrained-fp8")
    monkeypatch.setattr(Path, "unlink", unlink)
    names = {path.name for path in out.iterdir()}
    half = ".model-00002-of-00003.safetensors.partial"
    assert names == {"model-00001-of-00003.safetensors", half, JOURNAL}
    with pytest.raises(qv.CheckpointError, match="another kind"):
        convert_checkpoint(source, out, format="fbgemm-fp8")
    stamp = (out / "model-00001-of-00003.safetensors").stat().st_mtime_ns
    seen: list[tuple[int, int]] = []
    convert_checkpoint(
        source, out, format="finegrained-fp8", progress=lambda *done: seen.append(done)
    )
    assert begun[2:] == [half, ".model-00003-of-00003.safetensors.partial"]
    assert (out / "model-00001-of-00003.safetensors").stat().st_mtime_ns == stamp
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(t.numel() * t.element_size() for t in read(source).values())
    )
    assert seen == sorted(seen)
    convert_checkpoint(source, tmp_path / "whole", format="finegrained-fp8")
    one, two = read(out), read(tmp_path / "whole")
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)
    assert {path.name for path in out.iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_another_source_is_not_gone_on_with(tmp_path: Path, monkeypatch) -> None:
    source, out = write(tmp_path / "source", weights(), shards=3), tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(Killed):
            convert_checkpoint(source, out, format="fbgemm-fp8")
    write(source, weights(), shards=3)
    with pytest.raises(qv.CheckpointError, match="unfinished"):
        convert_checkpoint(source, out, format="fbgemm-fp8")
    convert_checkpoint(source, out, format="fbgemm-fp8", force=True)
    assert len(read(out)) == len(read(source)) + len(LAYERS)


def test_nothing_is_replaced_without_force(source: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", weights(torch.float32))
    (out / "mine.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(qv.CheckpointError, match="force"):
        convert_checkpoint(source, out, format="fbgemm-fp8")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    convert_checkpoint(source, out, format="fbgemm-fp8", force=True)
    assert (out / "mine.txt").read_text() == "mine"
    assert not (out / "model.safetensors").exists()  # it would be read in place of the index's
    assert read(out)[f"{LAYERS[0]}.weight"].dtype == E4M3


def test_source_and_destination_must_differ(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / ".." / "source"):
        with pytest.raises(qv.CheckpointError, match="source itself"):
            convert_checkpoint(source, out, format="fbgemm-fp8", force=True)
    assert len(read(source)) == len(weights())


def test_a_full_disk_is_said_and_can_be_mended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(*args, **kwargs) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(files, "save_file", full)
        with pytest.raises(qv.CheckpointError, match="No space left"):
            convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8")
    convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8")
    assert len(read(tmp_path / "out")) == len(read(source)) + len(LAYERS)


def test_files_are_synced_before_they_get_their_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def rename(old: Path, new: Path) -> None:
        events.append(("rename", str(new)))
        assert ("sync", str(old)) in events
        replace(old, new)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", rename)
    convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8")
    renamed = [Path(path).name for what, path in events if what == "rename"]
    assert renamed[-1] == "config.json"
    assert set(renamed) - {JOURNAL} == {path.name for path in (tmp_path / "out").iterdir()}


def test_one_file_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", weights(), shards=3)
    held: list[set[str]] = []
    real = module.write_tensors

    def watched(path: Path, tensors, *args) -> None:
        held.append(set(tensors))
        real(path, tensors, *args)

    monkeypatch.setattr(module, "write_tensors", watched)
    convert_checkpoint(source, tmp_path / "out", format="finegrained-fp8")
    assert len(held) == 3
    for names, file in zip(held, sorted(source.glob("*.safetensors")), strict=True):
        with safe_open(file, "pt") as opened:
            assert set(opened.keys()) == {n for n in names if not n.endswith("_scale_inv")}
