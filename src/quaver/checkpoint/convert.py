"""`convert_checkpoint`: a checkpoint on disk becomes an FP8 one, or back, file by file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quaver.checkpoint.files import (
    CONFIG,
    Folder,
    write_index,
    write_json,
    write_tensors,
    write_whole,
)
from quaver.checkpoint.journal import Journal
from quaver.checkpoint.plan import DEFAULT_EXCLUDE, Plan, make_plan
from quaver.checkpoint.targets import ScaleFormat, Target
from quaver.errors import CheckpointError
from quaver.recipe import Recipe

Progress = Callable[[int, int], None]
"""Called with the bytes of the source that are done, and all of them."""

_WEIGHTS = tuple(
    "*.safetensors *.safetensors.index.json *.bin *.bin.index.json *.pt *.pth *.gguf *.h5 "
    "*.msgpack *.onnx".split()
)


@dataclass(frozen=True)
class CheckpointReport:
    """What became of a checkpoint.

    Attributes:
        format: of the result.
        quantized, moved, requantized, dequantized: names of weights; "moved" are FP8 ones whose
            payload stayed as it was, bit for bit.
        left: other two-dimensional weights, and why they stayed in high precision.
        notes: what else a person should know.
        bytes_before, bytes_after: of the tensors.
    """

    format: str
    quantized: tuple[str, ...]
    moved: tuple[str, ...]
    requantized: tuple[str, ...]
    dequantized: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        lines = [f"{self.format}: {self.bytes_before:,} bytes became {self.bytes_after:,}"]
        for what in ("quantized", "moved", "requantized", "dequantized"):
            names = getattr(self, what)
            if names:
                lines.append(f"{len(names)} weights {what}, such as {names[0]}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            lines.append(f"{len(names)} left, such as {names[0]}: {reason}")
        return "\n".join([*lines, *self.notes])


def convert_checkpoint(  # noqa: PLR0913 - options, each by its name
    src: str | Path,
    dst: str | Path,
    *,
    format: str,
    recipe: Recipe | None = None,
    scale_format: ScaleFormat | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = DEFAULT_EXCLUDE,
    static_scales: Mapping[str, float] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Convert the checkpoint of a transformers model in the folder `src` into the folder `dst`.

    One file is in memory at a time. A conversion that was stopped goes on where it was when it is
    called again; a file appears under its name only when it is whole, and config.json last. What
    is linear is told by the weights' names. Files without weights are copied.

    Args:
        format: "finegrained-fp8", "fbgemm-fp8", "compressed-tensors" or "dequantized".
        recipe: how weights are quantized, where the source has none that fit. finegrained-fp8:
            Float8BlockScaling (the default), MXFP8BlockScaling, or Float8CurrentScaling for one
            scale a tensor; fbgemm-fp8: None, a scale a row; compressed-tensors: None, a scale a
            row, or Float8CurrentScaling or Float8BlockScaling.
        scale_format: "float32", the default, or "e8m0", of finegrained-fp8's blocks.
        include, exclude: globs on the names of layers, as `quaver.convert` takes them. A source
            that is FP8 already says itself what is linear: the default has no part in it, and a
            layer that is left is dequantized.
        static_scales: of the inputs, by layer; each x ≈ payload * scale. None: the source's own,
            if it has them for each layer, else inputs are quantized as they come.
        force: replace a checkpoint that `dst` holds.
        progress: called after each tensor.

    Raises:
        CheckpointError: the source is damaged, or `dst` is in use; nothing is left in `dst`.
        RecipeError: recipe, format and scale_format do not fit together.
    """
    target = Target.of(format, recipe, scale_format)
    folder = Folder(Path(src))
    destination = Path(dst)
    if not (folder.path / CONFIG).exists():
        raise CheckpointError(f"{folder.path} must be a transformers checkpoint with {CONFIG}")
    plan = make_plan(folder, target, include, exclude, static_scales)
    journal = Journal.begin(folder, destination, _options(target, plan), force)
    try:
        _write(folder, destination, target, plan, progress)
    except CheckpointError:
        journal.clear()
        raise
    except OSError as error:
        raise CheckpointError(
            f"{destination} could not be written ({error}); mend that and run again, it goes on "
            "from here"
        ) from None
    journal.finish()
    return _report(folder, Folder(destination), target, plan)


def _options(target: Target, plan: Plan) -> dict[str, Any]:
    """What must be the same for a conversion to go on."""
    return {
        "target": repr(target),
        "actions": plan.actions,
        "static": plan.static,
    }


def _write(
    folder: Folder, destination: Path, target: Target, plan: Plan, progress: Progress | None
) -> None:
    files = _write_files(folder, destination, target, plan, progress)
    if folder.is_sharded:
        write_index(destination, files)
    _copy_others(folder.path, destination)
    write_json(destination / CONFIG, _config(folder.config(), target, plan))


def _write_files(
    folder: Folder, destination: Path, target: Target, plan: Plan, progress: Progress | None
) -> list[str]:
    total = sum(entry.nbytes for entry in folder.entries.values())
    dropped = plan.drop | plan.pickles
    done = 0
    written = []
    for file in folder.files:
        names = folder.names_in(file)
        is_there = (destination / file).exists()
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if not is_there and name not in dropped:
                tensors |= _converted(folder, name, target, plan)
            done += folder.entries[name].nbytes
            if progress is not None:
                progress(done, total)
        if tensors:
            write_tensors(destination / file, tensors)
        if tensors or is_there:
            written.append(file)
        folder.close()
    return written


def _converted(folder: Folder, name: str, target: Target, plan: Plan) -> dict[str, torch.Tensor]:
    """What becomes of one tensor: itself, or a payload and its scales."""
    tensor = folder.read(name)
    layer = name.removesuffix(".weight")
    action, stored = plan.actions.get(name), plan.stored.get(name)
    if action is None:
        return {name: tensor}
    if stored is not None and action == "dequantize":
        return {name: stored.dequantize(tensor, plan.dtype)}
    if stored is not None and action == "move":
        data, scale = tensor, stored.scale
    else:
        values = tensor if stored is None else stored.dequantize(tensor, torch.float32)
        if not torch.isfinite(values).all():
            raise CheckpointError(
                f"{name} holds NaN or inf, which no scale can be found for; exclude {layer!r}, or "
                "mend the checkpoint"
            )
        data, scale = target.quantize(values)
    result = {name: data, f"{layer}.{target.scale_name}": target.written_scale(scale)}
    if layer in plan.static:
        result[f"{layer}.{target.input_name}"] = target.input_scale(plan.static[layer])
    return result


def _copy_others(source: Path, destination: Path) -> None:
    """Copy what belongs to a checkpoint beside weights and config.json, such as the tokenizer."""
    for path in sorted(source.iterdir()):
        is_weights = any(path.match(pattern) for pattern in _WEIGHTS)
        if path.is_file() and not is_weights and path.name != CONFIG and path.name[0] != ".":
            write_whole(destination / path.name, partial(shutil.copyfile, path))


def _config(config: dict[str, Any], target: Target, plan: Plan) -> dict[str, Any]:
    said = config.pop("quantization_config", None) or {}
    known = [*(said.get("modules_to_not_convert") or ()), *(said.get("ignore") or ())]
    left = [name.removesuffix(".weight") for name in plan.left]
    # A tied lm_head has no weight of its own in a checkpoint, and must be named all the same.
    left = sorted({*left, *known, "lm_head"} - set(plan.layers()))
    quantization = target.quantization_config(left, bool(plan.static))
    return config if quantization is None else config | {"quantization_config": quantization}


def _report(source: Folder, result: Folder, target: Target, plan: Plan) -> CheckpointReport:
    before, after = (
        sum(entry.nbytes for entry in folder.entries.values()) for folder in (source, result)
    )
    stray = [name for name in plan.drop if f"{name.rpartition('.')[0]}.weight" not in plan.stored]
    notes = list(plan.notes)
    if stray:
        notes.append(f"{len(stray)} scales of weights that are not FP8 are dropped")
    return CheckpointReport(
        format=target.format,
        quantized=plan.names("quantize"),
        moved=plan.names("move"),
        requantized=plan.names("requantize"),
        dequantized=plan.names("dequantize"),
        left=tuple(plan.left.items()),
        notes=tuple(notes),
        bytes_before=before,
        bytes_after=after,
    )
