"""What lets a conversion go on after it was stopped: a file in the destination that says which."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quaver.checkpoint.files import CONFIG, PARTIAL, Folder, write_json
from quaver.errors import CheckpointError

JOURNAL = ".quaver-conversion.json"
_REPLACED = ("*.safetensors", "*.safetensors.index.json", CONFIG)


@dataclass(frozen=True)
class Journal:
    """A conversion that is under way.

    Attributes:
        folder: its destination.
        is_new: whether the folder was made for it.
    """

    folder: Path
    is_new: bool

    @classmethod
    def begin(
        cls, source: Folder, destination: Path, options: dict[str, Any], force: bool
    ) -> Journal:
        """Begin a conversion, or go on with one of the same source and options.

        Args:
            force: replace what `destination` holds.

        Raises:
            CheckpointError: `destination` is the source, or holds something else.
        """
        content = {
            "options": options,
            "source": {file: _stamp(source.path / file) for file in (*source.files, CONFIG)},
        }
        if destination.resolve() == source.path.resolve():
            raise CheckpointError(f"{destination} is the source itself; name another folder")
        if destination.exists() and not destination.is_dir():
            raise CheckpointError(f"{destination} is a file; name a folder")
        is_new = not destination.exists()
        begun = destination / JOURNAL
        if begun.exists() and _read(begun) == json.loads(json.dumps(content)):
            return cls(destination, is_new)
        if not is_new and any(destination.iterdir()):
            if not force:
                what = "an unfinished conversion of another kind" if begun.exists() else "files"
                raise CheckpointError(
                    f"{destination} holds {what} already; --force (force=True) replaces the "
                    "checkpoint in it"
                )
            cls(destination, False).clear()
        try:
            destination.mkdir(parents=True, exist_ok=True)
            write_json(begun, content)
        except OSError as error:
            raise CheckpointError(f"{destination} cannot be written: {error}") from None
        return cls(destination, is_new)

    def clear(self) -> None:
        """Remove what a conversion writes; the folder, too, if it was made for it."""
        for pattern in (*_REPLACED, f".*{PARTIAL}", JOURNAL):
            for path in self.folder.glob(pattern):
                path.unlink()
        if self.is_new and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def finish(self) -> None:
        """The conversion is complete."""
        for path in (*self.folder.glob(f".*{PARTIAL}"), self.folder / JOURNAL):
            path.unlink(missing_ok=True)


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
