"""Quantized tensors as FSDP2's shards: what is gathered, and what is made of it.

The payload of the row-wise copy travels, as bytes (torch's CPU collectives do not know FP8). The
shards are whole rows: FSDP2's even split of the first dimension.
"""

from __future__ import annotations

from typing import Any

import torch

Gathered = tuple[tuple[torch.Tensor, ...], Any]
"""What is gathered, and what `after_gather` needs besides."""


def before_gather(tensor: Any, mesh: Any, outer_size: torch.Size) -> Gathered:
    """The row-wise parts of a shard, which are gathered, and how to make a tensor of them."""
    shared, split = tensor.shard_parts(mesh.get_group())
    sent = tuple(
        part.view(torch.uint8) if part.element_size() == 1 else part for part in split.values()
    )
    forms = [(name, part.dtype) for name, part in split.items()]
    frame = tensor.frame()._replace(shape=torch.Size(outer_size), is_view=False)
    return sent, (type(tensor), forms, shared, frame)


def after_gather(
    outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, out: Any
) -> Any:
    """The whole tensor, and the memory that FSDP2 frees between uses.

    With `out`, the whole tensor of an earlier call, whose payload is the same memory, nothing is
    returned.
    """
    kind, forms, shared, frame = metadata
    parts = shared | {
        name: output.view(form) for (name, form), output in zip(forms, outputs, strict=True)
    }
    if out is None:
        return kind.build(parts, frame._replace(dtype=dtype)), outputs
    whole = getattr(out, "_local_tensor", out)
    for name, part in parts.items():
        setattr(whole, name, part)
    return None
