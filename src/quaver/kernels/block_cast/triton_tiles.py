"""Casting a matrix to FP8 in blocks, a tile a program: what the block formats share in Triton.

A tile is read once and serves both usages. Its rows are dealt out so that a thread, which gets
rows at equal distances, holds neighbours of one column: then the transposed payload goes through
shared memory by words of 4 bytes instead of single ones. Scales that are powers of two are made by
integers: with divisions the kernel has 1.6 times the instructions, and so many registers that one
program fills a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quaver.formats import E5M2
from quaver.kernels.block_cast.blocks import Block, Results, empty_usages
from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import (
    block_amax,
    current_scale,
    e8m0_bytes,
    fp8_bytes,
    fp8_values,
    narrowed,
    power_of_two,
    reciprocal,
    widened,
)

ANY, POWER_2, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Rules of scales: `current_scale`, as it is or rounded down to a power of two; MX's."""

NEIGHBOURS = 4
"""Rows beside each other that are dealt to one thread."""


class Tile(NamedTuple):
    """Rows, or columns, of a tile, which the size of blocks divides; warps; registers a thread."""

    side: int
    warps: int
    registers: int


_BIAS = tl.constexpr(127)
_INFINITY = tl.constexpr(0x7F800000)
_ABOVE_175 = tl.constexpr(0x1FFFFF)
"""Added to a mantissa above that of 1.75, it carries into the exponent."""
_MANTISSA_BITS = tl.constexpr(23)
_LARGEST_EXPONENT = tl.constexpr(254)
_E8M0_NAN = tl.constexpr(0xFF)
_BYTES = tl.constexpr(tl.pointer_type(tl.uint8))

DEQUANTIZE_TILE = (32, 128, 4)
"""Rows, columns and warps."""


@triton.jit
def _exponent(amax, HIGHEST: tl.constexpr):
    """The biased exponent of `current_scale(amax, limit, 0, True)`, without its division.

    The limit is 1.75 * 2^(HIGHEST - 254). The quotient of the mantissas 1.75 and m is below 1 if
    and only if m > 1.75, also once it is rounded: at the least such m it is 1 - 1.14 * 2^-24.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = HIGHEST - ((bits + _ABOVE_175) >> _MANTISSA_BITS)
    usable = (bits > 0) & (bits < _INFINITY)
    return tl.where(usable, tl.minimum(exponent, _LARGEST_EXPONENT), _BIAS)


@triton.jit
def _scales(amax, epsilon, RULE: tl.constexpr, IS_E5M2: tl.constexpr):
    """Of amaxes: the scales that multiply before the cast, and those to be stored."""
    limit: tl.constexpr = 57344.0 if IS_E5M2 else 448.0
    if RULE == E8M0:
        byte = e8m0_bytes(amax, limit)
        scale = power_of_two(2 * _BIAS - byte)
        stored = byte.to(tl.uint8)
    elif RULE == POWER_2:
        exponent = _exponent(tl.where(amax < epsilon, epsilon, amax), 269 if IS_E5M2 else 262)
        scale = power_of_two(exponent)
        stored = power_of_two(2 * _BIAS - exponent)
    else:
        scale = current_scale(amax, limit, epsilon, False)
        stored = reciprocal(scale)
    return scale, stored


@triton.jit
def _scaled_rows(x, epsilon, BLOCK: tl.constexpr, RULE: tl.constexpr, IS_E5M2: tl.constexpr):
    """x [N, N] times its scales, each of BLOCK values of a row, and what is stored of them."""
    side: tl.constexpr = x.shape[0]
    split = tl.reshape(x, (side, side // BLOCK, BLOCK))
    scale, stored = _scales(block_amax(split, 2), epsilon, RULE, IS_E5M2)
    return tl.reshape(split * scale[:, :, None], (side, side)), stored


@triton.jit
def _scaled_columns(
    x,
    epsilon,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    RULE: tl.constexpr,
    IS_E5M2: tl.constexpr,
):
    """`_scaled_rows` of the transpose, turned back; x's rows are dealt out."""
    side: tl.constexpr = x.shape[0]
    split = tl.reshape(x, (NEIGHBOURS, side // BLOCK, BLOCK // NEIGHBOURS, side))
    amax = tl.max(block_amax(split, 0), 1)  # those of a thread first
    scale, stored = _scales(amax, epsilon, RULE, IS_E5M2)
    return tl.reshape(split * scale[None, :, None, :], (side, side)), tl.trans(stored)


@triton.jit
def _store_scales(into, stored, line, lines, block, blocks, line_stride, block_stride):
    """Store scales [lines of a tile, blocks of a line] in [lines, blocks]."""
    inside = (line < lines)[:, None] & (block < blocks)[None, :]
    there = into + line[:, None] * line_stride + block[None, :] * block_stride
    tl.store(there, stored, mask=inside)


@triton.jit
def _cast_tiles(
    x, row, row_scale, col, col_scale, rows, columns, row_stride, column_stride,
    row_scale_line, row_scale_block, col_scale_line, col_scale_block, epsilon,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    RULE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, columns] in one or both usages.

    SQUARE: blocks of BLOCK x BLOCK instead of 1 x BLOCK; then BLOCK is TILE.
    """
    row, col = row.to(_BYTES, bitcast=True), col.to(_BYTES, bitcast=True)
    apart: tl.constexpr = TILE // NEIGHBOURS
    blocks: tl.constexpr = TILE // BLOCK
    beside, below = tl.cdiv(columns, BLOCK), tl.cdiv(rows, BLOCK)
    tile_row = (tl.program_id(0) // tl.cdiv(columns, TILE)).to(tl.int64)
    tile_column = (tl.program_id(0) % tl.cdiv(columns, TILE)).to(tl.int64)
    i, b = tl.arange(0, TILE), tl.arange(0, blocks)
    r, c = tile_row * TILE + i, tile_column * TILE + i
    dealt = tile_row * TILE + (i % apart) * NEIGHBOURS + i // apart
    inside = (dealt < rows)[:, None] & (c < columns)[None, :]
    at = x + dealt[:, None] * row_stride + c[None, :] * column_stride
    values = widened(tl.load(at, mask=inside, other=0.0))
    if SQUARE:
        scale, stored = _scales(block_amax(values, None), epsilon, RULE, IS_E5M2)
        scaled = values * scale
    if ROWWISE:
        if SQUARE:
            tl.store(row_scale + tile_row * beside + tile_column, stored)
        else:
            scaled, stored = _scaled_rows(values, epsilon, BLOCK, RULE, IS_E5M2)
            block = tile_column * blocks + b
            strides = row_scale_line, row_scale_block
            _store_scales(row_scale, stored, dealt, rows, block, beside, *strides)
        payload = fp8_bytes(scaled, IS_E5M2, NATIVE)
        tl.store(row + dealt[:, None] * columns + c[None, :], payload, mask=inside)
    if COLUMNWISE:
        if SQUARE:
            tl.store(col_scale + tile_column * below + tile_row, stored)
        else:
            scaled, stored = _scaled_columns(values, epsilon, BLOCK, NEIGHBOURS, RULE, IS_E5M2)
            block = tile_row * blocks + b
            strides = col_scale_line, col_scale_block
            _store_scales(col_scale, stored, c, columns, block, below, *strides)
        payload = fp8_bytes(scaled, IS_E5M2, NATIVE)
        neighbours = tl.reshape(payload, (NEIGHBOURS, apart, TILE))
        upright = tl.reshape(tl.permute(neighbours, (2, 1, 0)), (TILE, TILE))
        turned = (c < columns)[:, None] & (r < rows)[None, :]
        tl.store(col + c[:, None] * rows + r[None, :], upright, mask=turned)


@triton.jit
def _dequantize_tiles(
    data,
    scale,
    x,
    rows,
    columns,
    row_stride,
    column_stride,
    scale_row_stride,
    scale_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    RULE: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of x = data * scale; a scale is for HEIGHT x WIDTH values."""
    blocks: tl.constexpr = COLUMNS // WIDTH
    beside = tl.cdiv(columns, COLUMNS)
    tile_column = (tl.program_id(0) % beside).to(tl.int64)
    r = (tl.program_id(0) // beside).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = data.to(_BYTES, bitcast=True) + r[:, None] * row_stride + c[None, :] * column_stride
    values = fp8_values(tl.load(at, mask=inside, other=0), IS_E5M2, NATIVE)
    b = tile_column * blocks + tl.arange(0, blocks)
    held = (r < rows)[:, None] & (b < tl.cdiv(columns, WIDTH))[None, :]
    at = scale + (r // HEIGHT)[:, None] * scale_row_stride + b[None, :] * scale_column_stride
    factor = tl.load(at, mask=held, other=0)
    if RULE == E8M0:
        byte = factor.to(tl.int32)
        factor = tl.where(byte == _E8M0_NAN, float("nan"), power_of_two(byte))
    product = tl.reshape(values, (ROWS, blocks, WIDTH)) * factor[:, :, None]
    result = narrowed(tl.reshape(product, (ROWS, COLUMNS)), x.dtype.element_ty, NATIVE)
    tl.store(x + r[:, None] * columns + c[None, :], result, mask=inside)


def cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: Block,
    rule: int,
    epsilon: float,
    usages: tuple[bool, bool],
    tile: Tile,
) -> Results:
    """`cast_usages` of the references, with a rule of this module; E8M0 scales are uint8."""
    if x.stride(0) == 1 != x.stride(1):  # rows are read along the memory
        turned = cast_blocks(x.t(), dtype, block, rule, epsilon, usages[::-1], tile)
        return *turned[2:], *turned[:2]
    stored = torch.uint8 if rule == E8M0.value else torch.float32
    results = empty_usages(x, dtype, block, stored, usages)
    if x.numel() == 0:
        return results
    row, row_scale, col, col_scale = results
    native = is_native(_cast_tiles, x.device)
    launch_grid(
        _cast_tiles,
        (cdiv(x.shape[0], tile.side) * cdiv(x.shape[1], tile.side),),
        x,
        row if native else row.view(torch.uint8),  # without E4M3 there is no pointer to it either
        row_scale,
        col if native else col.view(torch.uint8),
        col_scale,
        *x.shape,
        *x.stride(),
        *(row_scale.stride() if usages[0] else (0, 0)),
        *(col_scale.stride() if usages[1] else (0, 0)),
        epsilon,
        TILE=tile.side,
        BLOCK=block[1],
        SQUARE=block[0] > 1,
        NEIGHBOURS=NEIGHBOURS,
        RULE=rule,
        ROWWISE=usages[0],
        COLUMNWISE=usages[1],
        IS_E5M2=dtype == E5M2,
        NATIVE=native,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        enable_fp_fusion=False,
    )
    return results


def dequantize_blocks(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: Block,
    rule: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As the references' function of this name; E8M0 scales are uint8."""
    x = torch.empty(data.shape, dtype=dtype, device=data.device)
    if data.numel() == 0:
        return x
    native = is_native(_dequantize_tiles, x.device)
    rows, columns, warps = DEQUANTIZE_TILE
    launch_grid(
        _dequantize_tiles,
        (cdiv(data.shape[0], rows) * cdiv(data.shape[1], columns),),
        data if native else data.view(torch.uint8),
        scale,
        x,
        *data.shape,
        *data.stride(),
        *scale.stride(),
        ROWS=rows,
        COLUMNS=columns,
        HEIGHT=block[0],
        WIDTH=block[1],
        RULE=rule,
        IS_E5M2=data.dtype == E5M2,
        NATIVE=native,
        num_warps=warps,
    )
    return x
