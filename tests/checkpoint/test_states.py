"""Scaling states within checkpoints: pickles execute nothing and are not passed on."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import quaver as qv
from quaver.checkpoint import convert_checkpoint, load_model, load_quantized, save_model
from quaver.cli.app import app
from tests.checkpoint.folders import LAYERS, read, same, weights, write
from tests.scaling.test_te_state import EVIL, FLAG, content, raw, tensor

STATE = f"{LAYERS[0]}._extra_state"


def state(scale: float = 2.0) -> torch.Tensor:
    """Of a layer that took a TransformerEngine state; with one of its scales replaced."""
    layer = qv.Linear(32, 32)
    layer.set_extra_state(tensor(content()))
    layer.recipe_states["forward"].scale[0] = scale
    return layer.get_extra_state()


WRONG = {
    **{f"malice: {kind}": raw(data) for kind, data in EVIL.items()},
    "a pickle of the oldest form": raw(b"cos\ngetcwd\n(tR."),
    "a number": raw(b"7"),
    "a matrix": torch.ones(8, 8, dtype=torch.uint8),
    "a scale of NaN": state(torch.nan),
    "a negative scale": state(-1.0),
    "cut short": state()[:-8],
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FLAG, raising=False)
    yield
    assert FLAG not in os.environ
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_state_is_one_line_and_exit_code_2(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights() | {STATE: WRONG[kind]}, shards=3)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["convert-checkpoint", str(source), str(tmp_path / "out"), "--format"]
    result = CliRunner().invoke(app, [*arguments, "fbgemm-fp8"])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"quaver: {STATE}: ")
    assert sorted(tmp_path.rglob("*")) == before


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = qv.Linear(32, 32)
        self.down = qv.Linear(32, 32)


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_is_as_it_was(kind: str, tmp_path: Path) -> None:
    source = Up()
    save_model(source, tmp_path)
    tensors = read(tmp_path)
    write(tmp_path, tensors | {"down._extra_state": WRONG[kind]})
    model = Up()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(qv.CheckpointError, match=r"down\._extra_state: ") as caught:
        load_quantized(model, tmp_path)
    assert "\n" not in str(caught.value)
    metadata = tmp_path / "again"
    save_with_state(source, metadata, WRONG[kind])
    with pytest.raises(qv.CheckpointError, match=r"down\._extra_state: "):
        load_model(model, metadata)
    assert all(same(value, before[name]) for name, value in model.state_dict().items())


def save_with_state(model: nn.Module, folder: Path, wrong: torch.Tensor) -> None:
    model.down.get_extra_state = lambda: wrong
    save_model(model, folder)
    del model.down.get_extra_state


def test_pickles_are_dropped_and_said_and_quavers_states_stay(tmp_path: Path) -> None:
    ours = f"{LAYERS[1]}._extra_state"
    tensors = weights() | {STATE: tensor(content()), ours: state()}
    source = write(tmp_path / "source", tensors, shards=3)
    report = convert_checkpoint(source, tmp_path / "out", format="fbgemm-fp8")
    assert [note for note in report.notes if note.startswith("1 scaling states of Transformer")]
    found = read(tmp_path / "out")
    assert STATE not in found
    assert same(found[ours], tensors[ours])


def test_a_pickle_of_transformer_engines_reaches_the_layer(tmp_path: Path) -> None:
    source = Up()
    save_with_state(source, tmp_path, tensor(content()))
    model = Up()
    load_model(model, tmp_path)
    forward = model.down.recipe_states["forward"]
    assert torch.equal(forward.scale, content()["scale_fwd"])
    assert torch.equal(model.up.weight, source.up.weight)
