"""``quaver convert-checkpoint``: a checkpoint on disk to FP8, or back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from quaver.checkpoint import (
    DEFAULT_EXCLUDE,
    FORMATS,
    CheckpointReport,
    calibrate_checkpoint,
    convert_checkpoint,
)
from quaver.cli.demo.options import RECIPES
from quaver.cli.errors import CommandError, one_line_errors
from quaver.recipe import Recipe

_SCALES = ("float32", "e8m0")


def convert_checkpoint_command(  # noqa: PLR0913, PLR0917 - options, each by its name
    src: Annotated[Path, typer.Argument(help="Folder of a transformers checkpoint.")],
    dst: Annotated[Path, typer.Argument(help="Folder for the result; made if need be.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="How weights are scaled: block (128×128, finegrained-fp8's default), mxfp8, or "
            "current (one scale a tensor). fbgemm-fp8, and compressed-tensors by default: a row."
        ),
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="float32 or e8m0, of finegrained-fp8's blocks.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Glob of layers to quantize; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Glob of layers to leave, beside those left by default; repeatable."),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="UTF-8 text to learn static input scales from.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint in DST.")] = False,
) -> None:
    """Convert a checkpoint to FP8, or back; a run that was stopped goes on where it was."""
    with one_line_errors():
        chosen = _recipe(recipe)
        if scales not in (None, *_SCALES):
            raise CommandError(f"unknown {scales!r}; --scales takes one of: {', '.join(_SCALES)}")
        static = None if calibrate is None else calibrate_checkpoint(src, _text(calibrate))
        with _progress_bar(dst.name) as progress:
            report: CheckpointReport = convert_checkpoint(
                src,
                dst,
                format=format,
                recipe=chosen,
                scale_format=scales,  # type: ignore[arg-type]
                include=include or None,
                exclude=(*DEFAULT_EXCLUDE, *(exclude or ())),
                static_scales=static,
                force=force,
                progress=progress,
            )
        print(report)


@contextmanager
def _progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """What takes bytes done and bytes in all; shown from its first call, not above an error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))

    def progress(done: int, total: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task(name)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield progress
    finally:
        if bar.tasks:
            bar.stop()


def _recipe(name: str | None) -> Recipe | None:
    if name is None:
        return None
    if name not in RECIPES:
        raise CommandError(f"unknown recipe {name!r}; --recipe takes one of: {', '.join(RECIPES)}")
    return RECIPES[name]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--calibrate {path} cannot be read as UTF-8 text: {error}") from None
