"""Each benchmark can be started as its README says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import two_gpus
from quaver.testing import launches

REPOSITORY = Path(__file__).parents[1]
BENCHMARKS = sorted(
    file.stem
    for file in (REPOSITORY / "benchmarks").glob("*.py")
    if file.stem not in ("__init__", "common", "gpu", "block_kernels", "fused_kernels")
)
"""What is left out is what others share."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_starts_as_a_module(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


def test_the_readme_and_make_name_the_benchmarks() -> None:
    assert BENCHMARKS == [
        "bench_attention",
        "bench_casts",
        "bench_kernels",
        "linear",
        "reference_linear",
        "train_recipes",
        "two_gpus",
    ]
    readme = (REPOSITORY / "benchmarks" / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in BENCHMARKS)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "BENCHMARKS := bench_casts reference_linear\n" in makefile


def test_two_gpus_measures_what_it_says(devices: list[torch.device]) -> None:
    """On simulated devices, whose times mean nothing."""
    shape = two_gpus.Shape(layers=2, batch=1, length=8, hidden=32, ffn=64, heads=4, groups=2)
    with launches() as log:
        rows = two_gpus.throughput(devices, shape, ["bf16", "delayed"], repeats=1)
    assert {launch.device for launch in log} == set(devices)
    assert [row[0] for row in rows] == [
        f"{name}, {where}" for name in ("bf16", "delayed") for where in ("one GPU", "two GPUs")
    ]
    assert all(row[1].endswith("same output") for row in rows)
    with launches() as log:
        rows = two_gpus.guard_cost(devices, ["current"], calls=1)
    assert {launch.device for launch in log} == {devices[1]}
    assert len(rows) == 2 * 3
    assert rows[0][2] == "1.000"
    assert all(row[1].endswith("µs") for row in rows)
