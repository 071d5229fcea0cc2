"""What every benchmark shares: interleaved timing, the machine in words, the dated report."""

from __future__ import annotations

import datetime
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Durations of one function in seconds, one per repeat."""

    seconds: list[float]

    @property
    def milliseconds(self) -> float:
        """The median, in ms."""
        return 1000 * statistics.median(self.seconds)

    def ratio(self, base: Timing) -> float:
        """The median over the repeats of this function's time over that of ``base`` next to it.

        Neighbours share what the machine was busy with, so that this is steadier than a ratio of
        two medians.
        """
        return statistics.median(a / b for a, b in zip(self.seconds, base.seconds, strict=True))


def time_interleaved(
    functions: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int
) -> dict[str, Timing]:
    """Time functions of CPU work in turn, again and again, after ``warm_up`` unmeasured rounds.

    Every round has another order, so that none always runs with what the same one left behind.
    """
    order = random.Random(0)
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, repeats):
        for name in order.sample(names, len(names)):
            start = time.perf_counter()
            functions[name]()
            elapsed = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(elapsed)
    return {name: Timing(values) for name, values in seconds.items()}


def describe_machine() -> list[str]:
    """The processor, how busy it was, and the versions that decide the figures; a line each."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"processor: {_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        f"vector instructions: {torch.backends.cpu.get_cpu_capability()}",
        f"load (1, 5, 15 minutes) at the end: {load}",
        f"system: {platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}, torch {torch.__version__}",
    ]


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def command_line(module: str) -> str:
    """The command that was typed for ``python -m module``."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


@dataclass(frozen=True)
class Report:
    """A table of figures with what is needed to judge and repeat it."""

    name: str
    title: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def show(self, console: Console) -> None:
        """Print the table and the notes."""
        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def write(self, folder: Path = RESULTS) -> Path:
        """Write ``<date>-<name>.md``, over an earlier one of the same day, and return its path."""
        today = datetime.date.today().isoformat()
        lines = [
            f"# {self.title}",
            "",
            f"{today}, `{self.command}`",
            "",
            _markdown_row(self.columns),
            _markdown_row(["---", *("---:" for _ in self.columns[1:])]),
            *map(_markdown_row, self.rows),
            "",
            *(f"{note}\n" for note in self.notes),
            "## Machine",
            "",
            *(f"- {line}" for line in describe_machine()),
        ]
        folder.mkdir(exist_ok=True)
        path = folder / f"{today}-{self.name}.md"
        path.write_text("\n".join(lines) + "\n")
        return path


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
