"""What each recipe costs in training: the bits per byte that a byte-level GPT ends behind fp32.

    python -m benchmarks.train_recipes

The model, its text and its schedule are those of examples/train_bytes.py. For each seed all models
start from the same weights and see the same batches; fp32 is trained once for all recipes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console

from benchmarks.common import Report, command_line
from quaver.examples import train_bytes
from quaver.examples.train_bytes import LARGEST_GAPS, Trainee

CPU = (torch.device("cpu"),)


def train(names: Sequence[str], steps: int, seed: int, console: Console | None) -> list[Trainee]:
    """fp32 and the recipes `names` of `train_bytes.RECIPES`, trained on the CPU from `seed`."""
    pairs = [train_bytes.prepare(CPU, seed, name) for name in names]
    trainees = [pairs[0].full, *(pair.quantized for pair in pairs)]
    train_bytes.train(trainees, steps, seed, console)
    return trainees


def make_rows(runs: Sequence[Sequence[Trainee]]) -> list[list[str]]:
    """A row for each model: held-out bits per byte by seed, gaps to fp32, the limit, ms a step."""
    rows = []
    for column in zip(*runs, strict=True):
        name = column[0].name
        held_out = [f"{trainee.held_out:.4f}" for trainee in column]
        seconds = sum(trainee.seconds for trainee in column)
        milliseconds = 1000 * seconds / sum(len(trainee.losses) for trainee in column)
        gaps = [
            trainee.held_out - run[0].held_out for trainee, run in zip(column, runs, strict=True)
        ]
        row = [name, *held_out]
        if name in LARGEST_GAPS:
            limit = LARGEST_GAPS[name]
            verdict = "under" if max(gaps) < limit else "OVER"
            mean = sum(gaps) / len(gaps)
            row += [f"{mean:+.4f}", f"{max(gaps):+.4f}", f"{verdict} {limit}"]
        else:
            row += ["", "", ""]
        rows.append([*row, f"{milliseconds:.0f}"])
    return rows


def make_report(runs: Sequence[Sequence[Trainee]], seeds: Sequence[int]) -> Report:
    """The table of all seeds so far."""
    steps = len(runs[0][0].losses)
    parameters = train_bytes.count_parameters(runs[0][0].model)
    return Report(
        name="train-recipes",
        title=f"A byte-level GPT of {parameters:,} parameters, {steps} steps, by recipe",
        command=command_line("benchmarks.train_recipes"),
        columns=[
            "",
            *(f"seed {seed}" for seed in seeds),
            "mean gap",
            "largest gap",
            "limit",
            "ms per step",
        ],
        rows=make_rows(runs),
        notes=[
            "Held-out bits per byte, and how many more than fp32's with the same seed. Each limit "
            "is for the largest gap.",
            f"{train_bytes.BATCH} windows of {train_bytes.CONTEXT} bytes a step, AdamW; the four "
            "linear layers of each block are quantized, the head is not.",
        ],
    )


def main() -> None:
    """Train, print, and write the dated report after each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=train_bytes.STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--recipes", nargs="+", choices=[*LARGEST_GAPS], default=[*LARGEST_GAPS], metavar="RECIPE"
    )
    options = parser.parse_args()
    progress, console = Console(stderr=True), Console()
    runs: list[list[Trainee]] = []
    for seed in options.seeds:
        runs.append(train(options.recipes, options.steps, seed, progress))
        report = make_report(runs, options.seeds[: len(runs)])
        report.show(console)
        console.print(f"written to {report.write()}", soft_wrap=True)


if __name__ == "__main__":
    main()
