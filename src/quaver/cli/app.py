"""``quaver``: the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quaver import __version__
from quaver.cli.convert_checkpoint import convert_checkpoint_command
from quaver.cli.demo import DemoOptions, run_demo
from quaver.cli.demo.options import RECIPES
from quaver.cli.doctor import doctor
from quaver.cli.errors import one_line_errors
from quaver.cli.train_demo import train_demo

app = typer.Typer(
    name="quaver",
    help="FP8 for PyTorch, right on every device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"quaver {__version__}")
        raise typer.Exit


@app.callback()
def _quaver(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a transformers causal LM; default: SmolLM2-135M-Instruct."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read; default: Python's documentation.")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="auto, cpu, cuda, sim, or a list: cuda:0,cpu or sim:0,sim:1.")
    ] = "auto",
    recipe: Annotated[
        str, typer.Option(help=f"{', '.join(RECIPES)}; or all, for a table over them.")
    ] = "delayed",
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Run a language model in FP8 or FP4, split over two devices, against full precision."""
    with one_line_errors():
        options = DemoOptions(model=model, text=text, devices=devices, recipe=recipe, json=json)
        run_demo(options)


app.command()(train_demo)
app.command()(doctor)
app.command("convert-checkpoint")(convert_checkpoint_command)


def main() -> None:
    """The entry point of the ``quaver`` command."""
    app()


if __name__ == "__main__":
    main()
