"""Rotary position embedding: pairs of features turned by an angle that grows with the position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quaver.devices import operands_device
from quaver.functional.sequences import token_places
from quaver.kernels import rope
from quaver.kernels.rope import reference

FORMATS = ("bshd", "sbhd", "thd")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "bshd",
    *,
    interleaved: bool = False,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn the features of t by the angles of its positions, in float32.

    Args:
        t: [b, s, h, d], [s, b, h, d] or [t, h, d], as `tensor_format` says ("bshd", "sbhd", "thd").
        freqs: the angles, float32 [positions, 1, 1, r] with r <= d, in radians: what
            `RotaryPositionEmbedding` gives. The last d - r features stay as they are.
        interleaved: the pairs are neighbours, features 2i and 2i + 1; otherwise i and i + r/2.
        start_positions: integers [b], the position of the first token of each sequence; None: 0.
        cu_seqlens: [b + 1], the running total of the lengths; for "thd", and only there.

    Returns:
        The turned features in the shape and dtype of t. A position beyond `freqs` is an error on
        the CPU; on a GPU, where the host cannot see it, its features are NaN.

    Raises:
        DeviceMismatchError: two tensors lie on two devices.
        ValueError: shapes or options that do not go together.
    """
    tables = angle_tables(t, freqs, tensor_format, start_positions, cu_seqlens)
    return turn(t, tables, interleaved)


class AngleTables(NamedTuple):
    """The angles of the tokens of one tensor; another of its form can share them.

    Attributes:
        cos, sin: at least float32 [positions, r].
        positions: int64 [t], a row of them for each token, in the tensor's order.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


def angle_tables(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> AngleTables:
    """The angles for the tokens of t; arguments and errors as of `apply_rotary_pos_emb`."""
    operands_device(
        ("t", "freqs", "start_positions", "cu_seqlens"), (t, freqs, start_positions, cu_seqlens)
    )
    _check(t, freqs, tensor_format, cu_seqlens)
    angles = freqs.to(torch.promote_types(torch.float32, t.dtype)).flatten(1)  # [positions, r]
    if tensor_format == "thd":
        positions = _of_packed(t.shape[0], cu_seqlens, start_positions)
    else:
        batch, length = t.shape[:2] if tensor_format == "bshd" else (t.shape[1], t.shape[0])
        positions = _of_batch(batch, length, start_positions, t.device)
        if tensor_format == "sbhd":
            positions = positions.t()
        if start_positions is None:
            angles = angles[:length]
    return AngleTables(angles.cos(), angles.sin(), positions.reshape(-1))


def turn(t: torch.Tensor, tables: AngleTables, interleaved: bool) -> torch.Tensor:
    """Turn the features of t, [..., h, d], whose tokens are those of `tables`, in their order."""
    rows = t.flatten(0, -3) if t.dim() > 3 else t
    if t.dtype not in _DTYPES or tables.cos.dtype != torch.float32 or tables.cos.requires_grad:
        return reference.rope(rows, *tables, interleaved).view(t.shape)
    turned: torch.Tensor = _Rope.apply(rows, *tables, interleaved, False)  # type: ignore[no-untyped-call]
    return turned.view(t.shape)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        interleaved: bool,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.options = (interleaved, transposed)
        turned: torch.Tensor = rope(rows, cos, sin, positions, interleaved, transposed)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        interleaved, transposed = ctx.options
        back = (grad, *ctx.saved_tensors, interleaved, not transposed)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            turned = _Rope.apply(*back)  # type: ignore[no-untyped-call]
        else:
            turned = rope(*back)
        return turned, None, None, None, None, None


def _of_batch(
    batch: int, length: int, start_positions: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The positions of a batch's tokens, int64 [b, s]."""
    steps = torch.arange(length, device=device)
    if start_positions is None:
        return steps.expand(batch, length)
    if start_positions.shape != (batch,):
        raise ValueError(
            f"start_positions must have one entry for each of the {batch} sequences, "
            f"not shape {tuple(start_positions.shape)}"
        )
    return start_positions.long()[:, None] + steps


def _of_packed(
    tokens: int, cu_seqlens: torch.Tensor | None, start_positions: torch.Tensor | None
) -> torch.Tensor:
    """The positions of packed tokens, int64 [t]; 0 for tokens of no sequence."""
    if cu_seqlens is None:
        raise ValueError('the format "thd" needs cu_seqlens, the running total of the lengths')
    places = token_places(cu_seqlens, tokens)
    position = places.position
    if start_positions is not None:
        position = position + start_positions.long()[places.sequence]
    return position.masked_fill(~places.inside, 0)


def _check(
    t: torch.Tensor, freqs: torch.Tensor, tensor_format: str, cu_seqlens: torch.Tensor | None
) -> None:
    if tensor_format not in FORMATS:
        raise ValueError(f"tensor_format must be one of {', '.join(FORMATS)}, not {tensor_format}")
    dims = 3 if tensor_format == "thd" else 4
    if t.dim() != dims:
        raise ValueError(f"t must have {dims} dimensions for {tensor_format}, not {tuple(t.shape)}")
    if cu_seqlens is not None and tensor_format != "thd":
        raise ValueError(f'cu_seqlens belongs to the format "thd", not {tensor_format}')
    width = freqs.shape[-1]
    if freqs.dim() != 4 or width % 2 or width > t.shape[-1] or freqs.numel() != len(freqs) * width:
        raise ValueError(
            f"freqs must be [positions, 1, 1, r] with an even r of at most {t.shape[-1]}, "
            f"not {tuple(freqs.shape)}"
        )
    length = {"bshd": 1, "sbhd": 0}.get(tensor_format)
    if length is not None and t.shape[length] > len(freqs):
        raise ValueError(
            f"freqs must cover the {t.shape[length]} positions of t, but has {len(freqs)}"
        )
