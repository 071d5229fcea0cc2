"""Folders that are made once and kept: complete, or not there at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quaver.cli.errors import CommandError

_UNFINISHED = ".unfinished-"
_ABANDONED_AFTER_S = 3600.0


def cache_root() -> Path:
    """``QUAVER_CACHE_DIR``, or ``~/.cache/quaver``; CommandError where that home is unknown."""
    chosen = os.environ.get("QUAVER_CACHE_DIR", "").strip() or "~/.cache/quaver"
    try:
        return Path(chosen).expanduser()
    except RuntimeError:
        raise CommandError(
            f"the cache folder {chosen} is in no home folder that is known; set QUAVER_CACHE_DIR "
            "to a folder that can be written to"
        ) from None


def keep_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder ``target`` with what ``fill(folder)`` writes, unless it exists.

    It is written beside its place and renamed, so a process that is killed half-way leaves no
    half-written ``target``. Raises OSError when the disk refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    try:
        fill(unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            # Another process finished first: its folder is as good as ours.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """What killed processes left: unfinished folders that nobody can be writing any more."""
    for folder in parent.glob(f"{_UNFINISHED}*"):
        if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
