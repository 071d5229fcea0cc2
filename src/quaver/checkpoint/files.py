"""Checkpoint folders: which tensor lies in which file, and files that appear whole or not at all.

A folder holds `model.safetensors`, or several such files and `model.safetensors.index.json`, which
maps the tensors' names to them; beside them config.json.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quaver.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PARTIAL = ".partial"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Entry(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        file: the name of the file that holds it.
        dtype, shape: of the tensor.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Folder:
    """A checkpoint on disk, whose tensors are read one by one.

    Attributes:
        path: the folder.
        entries: its tensors by name, file by file.
        is_sharded: whether there is an index.
    """

    def __init__(self, path: Path) -> None:
        """Find the tensors; no values are read.

        Raises:
            CheckpointError: no checkpoint, shards missing or damaged, or an index that does not
                fit them or points outside the folder.
        """
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"{path} must be a folder with a checkpoint, and is none")
        self.is_sharded = not (path / SINGLE).exists() and (path / INDEX).exists()
        self._open: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        weight_map = self._index() if self.is_sharded else None
        files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        self._check_present(files)
        for file in files:
            for name, entry in tensors_of(path / file):
                if weight_map is None or weight_map.get(name, file) == file:
                    self.entries[name] = entry
        lost = sorted(set(weight_map or ()) - set(self.entries))
        if lost:
            raise CheckpointError(
                f"{path / INDEX} names {_some(lost)}, which its shards do not hold; the index or a "
                "shard is of another checkpoint"
            )

    @property
    def files(self) -> list[str]:
        """The names of the files with tensors, in order."""
        return list(dict.fromkeys(entry.file for entry in self.entries.values()))

    def names_in(self, file: str) -> list[str]:
        """The names of the tensors in `file`."""
        return [name for name, entry in self.entries.items() if entry.file == file]

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU."""
        file = self.entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, "pt")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path / file, error) from None
        return tensor

    def close(self) -> None:
        """Let go of the files, so that what was mapped of them can leave the memory."""
        self._open.clear()

    def config(self) -> dict[str, Any]:
        """config.json; empty if there is none.

        Raises:
            CheckpointError: it is no JSON object.
        """
        path = self.path / CONFIG
        return _json_object(path) if path.exists() else {}

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        weight_map = _json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} must map tensors to files under weight_map")
        for name, file in weight_map.items():
            inside = isinstance(file, str) and os.path.basename(file) == file
            if not inside or file in ("", ".", "..") or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path} must name safetensors files of its own folder, but has {file!r} for "
                    f"{name}"
                )
        return weight_map

    def _check_present(self, files: list[str]) -> None:
        missing = [file for file in files if not (self.path / file).is_file()]
        if missing and not self.is_sharded:
            raise CheckpointError(
                f"{self.path} must hold {SINGLE} or {INDEX}, and has neither; save the model with "
                "save_pretrained, which writes safetensors"
            )
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of the {len(files)} files that its index names: "
                f"{_some(missing)}; download them again"
            )


def tensors_of(path: Path) -> list[tuple[str, Entry]]:
    """The tensors of a safetensors file; no values are read.

    Raises:
        CheckpointError: the file is damaged, or holds a tensor of a dtype that is not known.
    """
    found = []
    try:
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                kind = part.get_dtype()
                if kind not in _DTYPES:
                    raise CheckpointError(f"{path} holds {name} as {kind}, which is not known")
                found.append((name, Entry(path.name, _DTYPES[kind], tuple(part.get_shape()))))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None
    return found


def _damaged(path: Path, error: Exception) -> CheckpointError:
    said = " ".join(str(error).split())
    return CheckpointError(
        f"{path} is cut short or damaged and cannot be read ({said}); download it again"
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- writing


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file that is under its name whole or not at all, also after a loss of power.

    Args:
        path: its name; one that is there is replaced.
        write: writes the file to the path that it is given, in the same folder.
    """
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write `tensors`, on the CPU and contiguous, as one safetensors file."""
    known = {"format": "pt"} | (metadata or {})  # without it transformers refuses the file
    write_whole(path, lambda temporary: _save(tensors, temporary, known))


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_index(path: Path, files: list[str]) -> None:
    """Write the index of the checkpoint in the folder `path` that consists of `files`."""
    tensors = [pair for file in files for pair in tensors_of(path / file)]
    total = sum(entry.nbytes for _, entry in tensors)
    weight_map = {name: entry.file for name, entry in tensors}
    write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
