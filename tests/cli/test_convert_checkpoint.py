"""`quaver convert-checkpoint`: what it writes, says and refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import quaver as qv
from quaver.checkpoint import calibrate_checkpoint, load_quantized
from quaver.cli.app import app
from tests.checkpoint.folders import config_of, read, weights, write
from tests.checkpoint.test_damage import DAMAGED

LINEARS = 28


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert-checkpoint", *map(str, arguments)])


def test_a_model_is_converted_and_reported(llama_folder: Path, tmp_path: Path) -> None:
    result = run(llama_folder, tmp_path / "out", "--format", "finegrained-fp8")
    assert result.exit_code == 0, result.output
    assert f"{LINEARS} weights quantized" in result.stdout
    assert "model.embed_tokens.weight: excluded by '*embed*'" in result.stdout
    assert "out" in result.stderr  # the progress bar
    tokens = torch.arange(8)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # dequantized, on a CPU
    plain = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=theirs.dtype)
    with torch.no_grad():
        before = plain(tokens).logits
        assert len(load_quantized(plain, tmp_path / "out").dequantized) == LINEARS
        assert torch.equal(theirs(tokens).logits, plain(tokens).logits)
        assert not torch.equal(before, plain(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc").input_ids


def test_options_reach_the_conversion(tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights())
    result = run(
        *(source, tmp_path / "out", "--format", "finegrained-fp8", "--recipe", "block"),
        *("--scales", "e8m0", "--include", "*.1.*", "--exclude", "*.down_proj"),
    )
    assert result.exit_code == 0, result.output
    names = {name for name in read(tmp_path / "out") if name.endswith("_scale_inv")}
    assert names == {"model.layers.1.up_proj.weight_scale_inv"}
    assert config_of(tmp_path / "out")["quantization_config"]["scale_fmt"] == "ue8m0"
    again = run(source, tmp_path / "out", "--format", "fbgemm-fp8", "--force")
    assert again.exit_code == 0, again.output
    assert config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "fbgemm_fp8"


def test_calibration_gives_static_input_scales(
    llama_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    result = run(
        *(llama_folder, tmp_path / "out", "--format", "compressed-tensors"),
        *("--recipe", "current", "--calibrate", text_file),
    )
    assert result.exit_code == 0, result.output
    found = read(tmp_path / "out")
    scales = {name: value.item() for name, value in found.items() if name.endswith("input_scale")}
    assert len(scales) == LINEARS
    # the same by calibrating the model
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    recipe = qv.recipe.DelayedScaling(amax_history_len=1024)
    qv.convert(model, recipe)
    tokens = AutoTokenizer.from_pretrained(llama_folder)(text_file.read_text(), return_tensors="pt")
    for window in tokens.input_ids[0].split(64):
        with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=recipe):
            model(window[None])
    for name, scale in scales.items():
        state = model.get_submodule(name.removesuffix(".input_scale")).recipe_states["forward"]
        assert scale == pytest.approx(1 / state.scale[0].item(), rel=1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(llama_folder)
    qv.convert(loaded, recipe)
    assert len(load_quantized(loaded, tmp_path / "out").static_inputs) == LINEARS
    assert qv.status(loaded).layers[0].calibrated


def test_a_model_that_cannot_be_calibrated_is_said(
    llama_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", weights())
    fp8 = ("--format", "compressed-tensors", "--calibrate")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    for folder, text, says in (
        (source, text_file, "does not load"),
        (llama_folder, tmp_path / "empty.txt", "must not be empty"),
        (llama_folder, tmp_path / "latin.txt", "UTF-8"),
        (llama_folder, tmp_path / "absent.txt", "absent.txt"),
    ):
        assert_refused(run(folder, tmp_path / "out", *fp8, text), says)
    assert not (tmp_path / "out").exists()
    with pytest.raises(qv.CheckpointError, match="context"):
        calibrate_checkpoint(llama_folder, "text", context=1)


def test_code_in_a_folder_is_not_run_nor_asked_about(
    llama_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama_folder, source)
    config = config_of(source) | {
        "model_type": "unknown_of_its_own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    fp8 = ("--format", "compressed-tensors", "--calibrate", text_file)
    assert_refused(run(source, tmp_path / "out", *fp8), "does not load")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def assert_refused(result: Result, says: str) -> None:
    """Exit code 2, and one line that begins with the program's name."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("quaver: ")]
    assert len(lines) == 1
    assert re.search(says, lines[0])
    assert "Traceback" not in result.output
    assert "━" not in result.stderr  # nor an empty progress bar


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights(), shards=3)
    cut = write(tmp_path / "cut", weights())
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-9])
    lost = write(tmp_path / "lost", weights(), shards=3)
    (lost / "model-00002-of-00003.safetensors").unlink()
    out = tmp_path / "out"
    for arguments, says in (
        ((cut, out, "--format", "fbgemm-fp8"), "cut short"),
        ((lost, out, "--format", "fbgemm-fp8"), "lacks 1 of the 3"),
        ((tmp_path / "no", out, "--format", "fbgemm-fp8"), "must be a folder"),
        ((source, out, "--format", "awq"), "format must be one of"),
        ((source, out, "--format", "fbgemm-fp8", "--recipe", "mx"), "unknown recipe 'mx'"),
        ((source, out, "--format", "fbgemm-fp8", "--recipe", "nvfp4"), "takes no recipe at all"),
        ((source, out, "--format", "finegrained-fp8", "--scales", "fp16"), "unknown 'fp16'"),
        ((source, source, "--format", "fbgemm-fp8", "--force"), "source itself"),
        ((source, cut, "--format", "fbgemm-fp8"), "--force"),
        ((source, out, "--format", "dequantized"), "no weight"),
    ):
        assert_refused(run(*arguments), says)
    assert not out.exists()


@pytest.mark.parametrize("kind", DAMAGED)
def test_each_damage_is_exit_code_2_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    make, says = DAMAGED[kind]
    make(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    for format in ("dequantized", "finegrained-fp8"):
        assert_refused(run(tmp_path / "source", tmp_path / "out", "--format", format), says)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_names_the_formats() -> None:
    result = CliRunner().invoke(app, ["convert-checkpoint", "--help"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    for name in ("finegrained-fp8", "fbgemm-fp8", "compressed-tensors", "dequantized"):
        assert name in result.stdout
