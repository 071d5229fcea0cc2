"""The casts to FP8 and FP4 formats on the CPU, against torch's own cast.

    python -m benchmarks.bench_casts

torch's `x.to(torch.float8_e4m3fn)` writes one payload and knows no scale. Quaver's casts find the
amaxes, scale and saturate; with both usages they also write the transposed payload.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console

from benchmarks.common import Report, command_line, time_interleaved
from quaver.kernels.block_cast.op import block_cast
from quaver.kernels.current_cast.op import current_cast
from quaver.kernels.mx_cast.op import mx_cast
from quaver.kernels.nvfp4_cast.op import nvfp4_cast

SIZE = 4096
TARGET = 6
"""The most that an FP8 cast with both usages may cost, in torch's casts."""
TARGET_FP4 = 12
"""The most that an NVFP4 cast with one usage may cost."""

BASE = "torch x.to(float8_e4m3fn)"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make_functions() -> dict[str, Callable[[], object]]:
    """torch's cast, and each of ours with the usages that recipes ask for."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    return {
        BASE: lambda: x.to(E4M3),
        "current, row-wise": lambda: current_cast(x, E4M3, False, 0.0, None, False),
        "current, both": lambda: current_cast(x, E4M3, False, 0.0, None, True),
        "current E5M2, both": lambda: current_cast(x, E5M2, False, 0.0, None, True),
        "block 1x128, row-wise": lambda: block_cast(x, E4M3, 1, True, 0.0, True, False),
        "block 1x128, both": lambda: block_cast(x, E4M3, 1, True, 0.0, True, True),
        "block 128x128, both": lambda: block_cast(x, E4M3, 2, True, 0.0, True, True),
        "MXFP8, row-wise": lambda: mx_cast(x, E4M3, True, False),
        "MXFP8, both": lambda: mx_cast(x, E4M3, True, True),
        "NVFP4, row-wise": lambda: nvfp4_cast(x, False, False, 0, 0, True, False),
    }


def measure(repeats: int, warm_up: int) -> list[list[str]]:
    """A row for each cast: ms, and how many of torch's casts that is; the median, and the best."""
    timings = time_interleaved(make_functions(), repeats=repeats, warm_up=warm_up)
    base = timings[BASE]
    rows: list[list[str]] = []
    for name, timing in timings.items():
        best = min(timing.seconds)
        figures = (timing.milliseconds, timing.ratio(base), 1000 * best, best / min(base.seconds))
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
    return rows


def main() -> None:
    """Measure, print, and write the dated report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="1 gives steady ratios on a machine that others keep busy",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = Report(
        name="casts",
        title=f"Casts on the CPU, {SIZE}x{SIZE} bfloat16",
        command=command_line("benchmarks.bench_casts"),
        columns=["", "median ms", "casts", "best ms", "casts"],
        rows=measure(options.repeats, options.warm_up),
        notes=[
            f"Target: both usages in at most {TARGET} of torch's casts, NVFP4 with one usage in at "
            f"most {TARGET_FP4}.",
            "First the median over the rounds of the time, and of how many of torch's casts that "
            "is; then both of the best times, which others who use the machine change least.",
            f"{options.repeats} rounds, each cast once a round, in random order.",
        ],
    )
    console = Console()
    report.show(console)
    console.print(f"written to {report.write()}", soft_wrap=True)


if __name__ == "__main__":
    main()
