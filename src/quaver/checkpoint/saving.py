"""`save_model` and `load_model`: models with quantized parameters in safetensors files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quaver.checkpoint.files import INDEX, SINGLE, Folder, write_index, write_tensors
from quaver.checkpoint.flat import flatten_state, unflatten_state
from quaver.checkpoint.parameters import check_fit, load_plain, put_parameter
from quaver.checkpoint.states import check_states
from quaver.errors import CheckpointError
from quaver.tensors import QuantizedTensor

_DEFAULT_SHARD = 5 * 2**30


def save_model(
    model: nn.Module, folder: str | Path, *, max_shard_size: int = _DEFAULT_SHARD
) -> None:
    """Write the parameters, buffers and scaling states of `model` to `folder`, as safetensors.

    Args:
        model: may hold quantized parameters.
        folder: made if need be; files of the same names are replaced.
        max_shard_size: bytes; what is larger goes into several files with an index.

    Raises:
        CheckpointError: something has no values or cannot be written.
    """
    flat, metadata = flatten_state(model.state_dict())
    path = Path(folder)
    shards = list(_shards(flat, max_shard_size))
    count = len(shards)
    names = [SINGLE] if count == 1 else [shard_name(i, count) for i in range(count)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for stale in (SINGLE, INDEX):  # of an earlier checkpoint, which would be read instead
            (path / stale).unlink(missing_ok=True)
        for name, shard in zip(names, shards, strict=True):
            write_tensors(path / name, shard, metadata)
        if count > 1:
            write_index(path, names)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def load_model(model: nn.Module, folder: str | Path) -> None:
    """Load what `save_model` wrote into `model`, quantized parameters bit for bit.

    A parameter that is quantized in the file is so in the model afterwards, on the device where it
    was; others are copied into the model's, as `load_state_dict` does.

    Args:
        model: of the same structure; its parameters may be quantized or not, or on meta.

    Raises:
        CheckpointError: the files are damaged, or do not fit `model`; it is then unchanged.
    """
    files = Folder(Path(folder))
    metadata: dict[str, str] = {}
    for file in files.files:
        metadata |= _metadata(files.path / file)
    state = unflatten_state({name: files.read(name) for name in files.entries}, metadata)
    quantized = {n: value for n, value in state.items() if isinstance(value, QuantizedTensor)}
    check_fit(model, {name: value.shape for name, value in state.items()}, quantized)
    check_states(model, state)
    for name, value in quantized.items():
        put_parameter(model, name, value)
    load_plain(model, {n: value for n, value in state.items() if n not in quantized})


def shard_name(index: int, count: int) -> str:
    """The name of one of `count` files."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _shards(flat: dict[str, torch.Tensor], limit: int) -> Iterable[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in flat.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += nbytes
    yield shard
