"""Each benchmark can be started as its README says."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    ]
    readme = (REPOSITORY / "benchmarks" / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in BENCHMARKS)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "BENCHMARKS := bench_casts reference_linear\n" in makefile
