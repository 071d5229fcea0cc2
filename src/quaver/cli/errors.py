"""What a person at the command line did wrong: one line, exit code 2, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from quaver.errors import QuaverError

USAGE_EXIT_CODE = 2


class CommandError(QuaverError):
    """An argument, a file or an installation that the command cannot work with."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn every error of Quaver's own into one line on stderr and exit code 2.

    Other exceptions are faults of the program and keep their traceback.
    """
    try:
        yield
    except QuaverError as error:
        print(f"quaver: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(USAGE_EXIT_CODE) from None


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line; its type's name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__
