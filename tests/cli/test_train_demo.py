"""`quaver train-demo` and its readable source, examples/train_bytes.py."""

import io
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import Result
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import quaver as qv
from quaver.cli.app import app
from quaver.cli.demo.options import RECIPES
from quaver.examples import train_bytes
from quaver.testing import launches, simulated_devices

SOURCE = Path(__file__).parents[2] / "examples" / "train_bytes.py"
CPU = [torch.device("cpu")]
LINEARS = 4 * train_bytes.BLOCKS


def train_demo(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train-demo", *(str(argument) for argument in arguments)])


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to train on and to measure on, for runs of a few steps."""
    train, held_out = train_bytes.read_text()
    monkeypatch.setattr(train_bytes, "read_text", lambda: (train[:20_000], held_out[:2_000]))


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("quaver: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_the_recipes_are_the_demos() -> None:
    """By the same names, and of the same kinds."""
    assert list(train_bytes.RECIPES) == list(RECIPES)
    for name, recipe in train_bytes.RECIPES.items():
        assert type(recipe) is type(RECIPES[name]), name
        assert train_bytes.LARGEST_GAPS[name] == (0.15 if name == "nvfp4" else 0.05)


def linears(model: nn.Module, kind: type[nn.Linear]) -> int:
    return sum(type(module) is kind for module in model.modules())


def test_both_models_start_equal_and_split(devices: list[torch.device]) -> None:
    report = train_bytes.prepare(devices, seed=3)
    full, fp8 = report.full.model, report.quantized.model
    states = (full.state_dict(), fp8.state_dict())
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name
    assert (linears(full, nn.Linear), linears(full, qv.Linear)) == (LINEARS + 1, 0)
    assert (linears(fp8, nn.Linear), linears(fp8, qv.Linear)) == (1, LINEARS)
    assert 400_000 < train_bytes.count_parameters(fp8) < 600_000
    first, second = devices
    for model in (full, fp8):
        for name, parameter in model.named_parameters():
            on_first = name.startswith(("token", "position", "blocks.0.", "blocks.1."))
            assert parameter.device == (first if on_first else second), name


@pytest.mark.usefixtures("short_text")
def test_a_short_run_learns_in_fp8_on_both_devices(devices: list[torch.device]) -> None:
    steps = 12
    with launches() as seen:
        report = train_bytes.run(devices, steps)
    for trainee in (report.full, report.quantized):
        assert len(trainee.losses) == steps
        assert 7.5 < trainee.losses[0] < 9.0  # 8 bits is the uniform guess
        assert trainee.losses[-1] < trainee.losses[0] - 0.7
        assert trainee.held_out == pytest.approx(trainee.losses[-1], abs=0.5)
        assert trainee.seconds > 0
    # FP8 rounds, so that no loss is equal, and all are close.
    pairs = list(zip(report.full.losses, report.quantized.losses, strict=True))
    assert all(0 < abs(full - fp8) < 0.05 for full, fp8 in pairs)
    assert report.gap == report.quantized.held_out - report.full.held_out
    assert abs(report.gap) < 0.05
    # Each linear multiplies once forward and twice backward, and once for the held-out text.
    products = Counter(launch.device for launch in seen if launch.kernel == "scaled_mm")
    assert products == dict.fromkeys(devices, LINEARS // 2 * (3 * steps + 1))
    assert all(launch.current == launch.device for launch in seen)
    for block, device in zip(report.quantized.model.blocks, [0, 0, 1, 1], strict=True):
        state = block.get_submodule("down").recipe_states["forward"]
        assert state.scale.device == devices[device]


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_the_split_changes_no_bit(recipe: str) -> None:
    devices = simulated_devices(2)  # on GPUs attention's backward may sum in any order
    one, two = (train_bytes.run(places, 2, 0, recipe) for places in (devices[:1], devices))
    assert (
        one.quantized.model.blocks[0].qkv.recipe_states["forward"].recipe
        is (train_bytes.RECIPES[recipe])
    )
    for alone, split in ((one.full, two.full), (one.quantized, two.quantized)):
        assert alone.losses == split.losses
        assert alone.held_out == split.held_out


@pytest.mark.usefixtures("short_text")
def test_the_seed_decides_weights_and_batches_and_nothing_else() -> None:
    before = torch.get_rng_state()
    first, again, other = (train_bytes.run(CPU, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert again.quantized.losses == first.quantized.losses
    assert other.full.losses[0] != first.full.losses[0]


def test_no_paragraph_is_both_trained_on_and_held_out() -> None:
    train, held_out = (bytes(part.tolist()).decode() for part in train_bytes.read_text())
    assert len(train) > 8 * len(held_out) > 100_000
    whole = held_out.split("\n\n")[1:]  # the first may have been cut in two
    assert not set(whole) & set(train.split("\n\n"))
    assert sum(map(len, whole)) > 0.9 * len(held_out)


def test_learning_rate_warms_up_and_ends_near_zero() -> None:
    rates = [train_bytes.learning_rate(step, 600) for step in range(600)]
    assert rates[0] == pytest.approx(train_bytes.LEARNING_RATE / train_bytes.WARMUP)
    assert max(rates) == pytest.approx(train_bytes.LEARNING_RATE, rel=0.02)
    assert rates[-1] < 1e-4 * train_bytes.LEARNING_RATE


@pytest.mark.parametrize("count", [0, train_bytes.BLOCKS + 1])
def test_the_example_names_how_many_devices_it_takes(count: int) -> None:
    with pytest.raises(ValueError, match=f"4 blocks go on 1 to 4 devices, not on {count}"):
        train_bytes.run(CPU * count, 1)


@pytest.mark.parametrize(
    ("recipe", "fp8", "line"),
    [
        ("delayed", 2.5625, "gap +0.0625 bits per byte, OVER the limit of 0.05"),
        ("delayed", 2.515625, "gap +0.0156 bits per byte, under the limit of 0.05"),
        ("mxfp8", math.nan, "gap +nan bits per byte, OVER the limit of 0.05"),
        ("nvfp4", 2.5625, "gap +0.0625 bits per byte, under the limit of 0.15"),
    ],
)
def test_the_table_says_whether_the_gap_holds(recipe: str, fp8: float, line: str) -> None:
    report = train_bytes.prepare(CPU, 0, recipe)
    for trainee, held_out in ((report.full, 2.5), (report.quantized, fp8)):
        trainee.held_out, trainee.losses, trainee.seconds = held_out, [8.25, 4.125], 0.25
    console = Console(file=io.StringIO(), width=100)
    console.print(train_bytes.make_table(report))
    shown = console.file.getvalue()
    assert line in shown
    assert "blocks on cpu, cpu, cpu, cpu" in shown
    row = next(text for text in shown.splitlines() if "fp32" in text)
    assert row.split()[1::2] == ["fp32", "2.5000", "8.2500", "4.1250", "125.0"]


@pytest.mark.usefixtures("short_text")
def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    devices, kind = simulated_devices(2), "sim"
    out = tmp_path / "figures.json"
    arguments = ("--steps", 2, "--devices", kind, "--seed", 5, "--json", out)
    result = train_demo(*arguments, "--recipe", "mxfp8")
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    expected = train_bytes.run(devices, 2, 5, "mxfp8")
    assert figures["recipe"] == "mxfp8"
    assert "mxfp8" in result.stdout
    assert figures["block_devices"] == [f"{kind}:{i}" for i in (0, 0, 1, 1)]
    assert figures["parameters"] == train_bytes.count_parameters(expected.full.model)
    assert (figures["steps"], figures["seed"]) == (2, 5)
    for key, trainee in (("fp32", expected.full), ("quantized", expected.quantized)):
        assert figures[key]["training_bits_per_byte"] == trainee.losses
        assert figures[key]["held_out_bits_per_byte"] == trainee.held_out
        assert figures[key]["seconds"] > 0
    assert figures["gap"] == expected.gap
    assert f"{expected.quantized.held_out:.4f}" in result.stdout
    assert "training" in result.stderr
    assert "2/2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "gpu"), "unknown device 'gpu'"),
        (
            ("--recipe", "all"),
            "unknown recipe 'all'; --recipe takes one of: delayed, current, block, mxfp8, nvfp4",
        ),
        (("--devices", "sim:0,sim:1,sim:2,sim:3,cpu"), "4 blocks, too few for the 5 devices"),
        (("--json", "/nowhere/at/all.json"), "the folder /nowhere/at does not exist"),
        (("--json", "/proc/figures.json"), "--json /proc/figures.json cannot be written: "),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(train_bytes, "run")  # all of them are seen before the training
    assert words in refused(train_demo(*arguments))


@pytest.mark.parametrize(("option", "value"), [("--steps", 0), ("--seed", -1), ("--seed", 2**63)])
def test_numbers_out_of_range_are_refused(option: str, value: int) -> None:
    result = train_demo(option, value)
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert option in result.stderr


def test_the_example_runs_as_a_script() -> None:
    script = [sys.executable, "-W", "error", str(SOURCE), "--help"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--devices" in result.stdout
    assert "train_bytes.py" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_run_keeps_the_gap(devices: list[torch.device]) -> None:
    report = train_bytes.run(devices)
    assert report.full.held_out < 2.8
    assert report.gap < train_bytes.LARGEST_GAPS["delayed"]
