"""Quantized tensors as plain tensors, which is what travels inside Quaver."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Payload(NamedTuple):
    """x ≈ data * scale_inv, with one scale for all of x.

    Attributes:
        data: FP8, the shape of x.
        scale_inv: float32 [1].
    """

    data: torch.Tensor
    scale_inv: torch.Tensor


class Operand(NamedTuple):
    """One operand of a matrix product, [rows, summed dimension].

    Attributes:
        data: what the layout says; FP8 of the operand's shape, two FP4 values a byte, or plain.
        scale_inv: the scales; None for "plain".
        layout: how data and scales belong together, a name from `kernels.scaled_mm.layouts`.
        global_scale_inv: float32 [1]; of the layouts with two levels of scales.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None
    layout: str
    global_scale_inv: torch.Tensor | None = None


class Quantized(NamedTuple):
    """A tensor [M, K] as operands for the products that sum over K (row-wise) and over M.

    Attributes:
        rowwise: [M, K], or None where not asked for.
        columnwise: [K, M], or None.
    """

    rowwise: Operand | None
    columnwise: Operand | None


def paired(results: tuple[torch.Tensor, ...], layout: str) -> Quantized:
    """The operands from what a block cast returns.

    Args:
        results: row-wise payload and scales, column-wise payload and scales, of one dimension where
            they were not asked for; after them the global scale, where there is one.
        layout: of the operands.
    """
    row, row_scale, col, col_scale, *top = results
    global_scale_inv = top[0] if top else None
    return Quantized(
        Operand(row, row_scale, layout, global_scale_inv) if row.dim() > 1 else None,
        Operand(col, col_scale, layout, global_scale_inv) if col.dim() > 1 else None,
    )
