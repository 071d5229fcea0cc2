"""Transposing a matrix of bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_launch import cdiv, launch_grid

TILE = 128
WARPS = 8


@triton.jit
def _transpose(x, into, rows, columns, TILE: tl.constexpr):
    across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    there = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + there, mask=mask)
    back = column[:, None].to(tl.int64) * rows + row[None, :]
    back_mask = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(into + back, tl.trans(tile), mask=back_mask)


def transpose_bytes(x: torch.Tensor, into: torch.Tensor) -> None:
    """Write the transpose of x, uint8 [M, K], to `into`, uint8 [K, M]; both contiguous."""
    rows, columns = x.shape
    grid = (cdiv(rows, TILE) * cdiv(columns, TILE),)
    launch_grid(_transpose, grid, x, into, rows, columns, TILE=TILE, num_warps=WARPS)
