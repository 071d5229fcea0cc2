"""Files of TransformerEngine's users: `torch.save`d state dicts with io.BytesIO in them."""

from __future__ import annotations

import io
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from quaver.errors import CheckpointError


def load_te_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a `torch.save`d file whose extra states may be io.BytesIO objects.

    `torch.load(weights_only=True)` refuses those; here they are admitted, and nothing else more.
    `load_state_dict` of Quaver's modules takes them as they are.

    Raises:
        CheckpointError: the file holds something else that is not admitted, or is damaged.
    """
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        said = str(error).strip().splitlines()
        raise CheckpointError(f"{path} cannot be read: {said[0] if said else error!r}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a dict, not a {type(content).__name__}")
    return content
