"""Scaling states in checkpoints: found to be sound before anything else is done with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from quaver.checkpoint.files import Folder
from quaver.errors import CheckpointError
from quaver.nn.attention import DotProductAttention
from quaver.nn.base import QuantizedModule
from quaver.scaling.extra_state import check_unowned, unpack
from quaver.scaling.te_state import te_bytes

_KEY = "_extra_state"


def is_state(name: str) -> bool:
    """Whether a tensor of this name is a module's extra state."""
    return name.rpartition(".")[2] == _KEY


def pickled_states(folder: Folder) -> set[str]:
    """The names of the states in a checkpoint that are pickles, of which nothing is executed.

    All bytes under such names are read and checked; what is of another dtype is not Quaver's.

    Raises:
        CheckpointError: one is neither Quaver's nor TransformerEngine's, or not sound.
    """
    found = set()
    for name, entry in folder.entries.items():
        if not is_state(name) or entry.dtype != torch.uint8:
            continue
        try:
            if check_unowned(folder.read(name)):
                found.add(name)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    return found


def check_states(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise unless the modules of `model` can take the states among `tensors`.

    Args:
        model: has a module for each of them.
        tensors: of a checkpoint, by name.

    Raises:
        CheckpointError: a state is not sound, or of another module.
    """
    for name, value in tensors.items():
        if not is_state(name):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        passes_over = isinstance(module, DotProductAttention) and te_bytes(value) is not None
        if not isinstance(module, QuantizedModule) or passes_over:
            continue
        try:
            unpack(value, module._slots(), module._delayed_recipe())
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
