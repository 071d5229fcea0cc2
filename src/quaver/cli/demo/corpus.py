"""The text that the demo reads: where it comes from, and how it is cut into windows."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quaver.cli.errors import CommandError

WINDOW = 512
CALIBRATION_WINDOWS = 2
EVALUATION_WINDOWS = 4
SHORTEST_WINDOW = 8
"""Tokens in a window below which a perplexity says nothing."""

MAX_CHARACTERS = 2_000_000
"""A longer text is cut here: the demo uses a few thousand tokens, spread over what it reads."""


@dataclass(frozen=True)
class Corpus:
    """Two separate parts of one text, as token windows of shape (1, window), int64, on the CPU."""

    calibration: list[torch.Tensor]
    evaluation: list[torch.Tensor]


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or Python's own documentation for None.

    Raises CommandError when the file is missing, unreadable, not text, or blank.
    """
    if path is None:
        return "\n\n".join(pydoc_data.topics.topics.values())
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS)
    except OSError as error:
        raise CommandError(f"--text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--text {path} is not UTF-8 text") from None
    if not text.strip():
        raise CommandError(f"--text {path} is empty; give a file with some English text")
    return text


def make_corpus(text: str, encode: Callable[[str], list[int]], longest: int) -> Corpus:
    """Cut ``text`` into calibration windows (its beginning) and evaluation windows (the rest).

    ``encode`` gives token ids; ``longest`` is the model's context length. The evaluation windows
    are spread evenly over the rest. A short text gives shorter windows; CommandError below that.
    """
    ids = torch.tensor(encode(text), dtype=torch.int64)
    size = min(WINDOW, longest, len(ids) // 2)
    if size < SHORTEST_WINDOW:
        raise CommandError(
            f"the text has {len(ids)} tokens for a context of {longest}; "
            f"it must give two windows of at least {SHORTEST_WINDOW} tokens"
        )
    windows = list(ids[: len(ids) // size * size].view(-1, 1, size))
    head = min(CALIBRATION_WINDOWS, len(windows) - 1)
    rest = windows[head:]
    count = min(EVALUATION_WINDOWS, len(rest))
    spread = [rest[i * len(rest) // count] for i in range(count)]
    return Corpus(calibration=windows[:head], evaluation=spread)
