"""``quaver train-demo``: the training example, with its devices chosen and its figures written."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from quaver.cli.demo.devices import find_devices, start_devices
from quaver.cli.demo.options import DemoOptions, unwritable
from quaver.cli.errors import CommandError, one_line_errors
from quaver.examples import train_bytes
from quaver.examples.train_bytes import RECIPES, Report, Trainee


def train_demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = train_bytes.STEPS,
    devices: Annotated[
        str, typer.Option(help="auto, cpu, cuda, sim, or a list: cuda:0,cpu or sim:0,sim:1.")
    ] = "auto",
    recipe: Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")] = "delayed",
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Of the first weights and of the batches."),
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Train a byte-level GPT with a recipe and in fp32 side by side, split over two devices."""
    with one_line_errors():
        DemoOptions(json=json).check_json()
        _check_recipe(recipe)
        places = _places(devices)
        report = train_bytes.run(places, steps, seed, recipe, Console(stderr=True))
        Console().print(train_bytes.make_table(report))
        if json is not None:
            text = json_format.dumps(_figures(report, steps, seed), indent=2) + "\n"
            try:
                json.write_text(text)
            except OSError as error:
                raise unwritable(json, error) from None


def _check_recipe(name: str) -> None:
    if name not in RECIPES:
        raise CommandError(f"unknown recipe {name!r}; --recipe takes one of: {', '.join(RECIPES)}")


def _places(choice: str) -> list[torch.device]:
    names = find_devices(choice)
    if len(names) > train_bytes.BLOCKS:
        raise CommandError(
            f"the model has {train_bytes.BLOCKS} blocks, too few for the {len(names)} devices of "
            f"--devices {choice}; name fewer"
        )
    return start_devices(names)


def _figures(report: Report, steps: int, seed: int) -> dict[str, Any]:
    return {
        "recipe": report.quantized.name,
        "steps": steps,
        "seed": seed,
        "parameters": train_bytes.count_parameters(report.full.model),
        "block_devices": train_bytes.block_devices(report.quantized.model),
        "gap": report.gap,
        "fp32": _trainee(report.full),
        "quantized": _trainee(report.quantized),
    }


def _trainee(trainee: Trainee) -> dict[str, Any]:
    return {
        "held_out_bits_per_byte": trainee.held_out,
        "training_bits_per_byte": trainee.losses,
        "seconds": trainee.seconds,
    }


if __name__ == "__main__":
    typer.run(train_demo)
