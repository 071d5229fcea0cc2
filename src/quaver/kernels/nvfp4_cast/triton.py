"""`nvfp4_cast` and `nvfp4_dequantize` in Triton.

The cast reads x twice: once for the amax of all of it, which the global scale needs, and once for
the payloads of both usages. The scales never leave the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.formats import E4M3
from quaver.kernels.common.triton_fused import is_native
from quaver.kernels.common.triton_launch import cdiv, launch_grid
from quaver.kernels.common.triton_numbers import (
    fp8_values,
    narrowed,
    reciprocal,
    scale_from_amax,
    widened,
)
from quaver.kernels.common.triton_tiles import PARTS, joined_amax, partial_amax
from quaver.kernels.nvfp4_cast.reference import BLOCK
from quaver.kernels.nvfp4_cast.triton_numbers import (
    block_amax_or_nan,
    block_scale,
    e2m1_codes,
    e2m1_values,
    philox_words,
    words_to_int64,
)

TILE, WARPS = 64, 4
"""Rows and columns of a cast's tile, a multiple of 16."""
NEIGHBOURS = 4
"""Rows beside each other that a thread loads, so that it finds fewer scales of columns."""
DEQUANTIZE_ROWS, DEQUANTIZE_COLUMNS, DEQUANTIZE_WARPS = 32, 128, 4

_BYTES = tl.constexpr(tl.pointer_type(tl.uint8))


@triton.jit
def _uniform(
    first_row,
    first_column,
    columns,
    seed,
    offset,
    STREAM: tl.constexpr,
    TILE: tl.constexpr,
    FOURS: tl.constexpr,
):
    """Numbers in [0, 1) for the elements of a tile of a matrix.

    FOURS: 4 divides `columns`, so that four neighbours share a counter and its four words.
    """
    r = first_row + tl.arange(0, TILE)
    if FOURS:
        quarter: tl.constexpr = TILE // 4
        c = first_column + 4 * tl.arange(0, quarter)
        group = (r[:, None] * columns + c[None, :]) >> 2
        w0, w1, w2, w3 = philox_words(group, seed, offset, STREAM)
        bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE, TILE))
    else:
        c = first_column + tl.arange(0, TILE)
        index = r[:, None] * columns + c[None, :]
        w0, w1, w2, w3 = philox_words(index >> 2, seed, offset, STREAM)
        word = index & 3
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _store_tile(
    x,
    uniform,
    first_row,
    first_column,
    rows,
    columns,
    pairs,
    data,
    scales,
    global_scale,
    global_inv,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Cast x, a tile in float32 of [rows, columns], and store its payload and scales.

    pairs: ceil(columns / 2). An argument, since Triton would not see that 16 divides it.
    """
    blocks: tl.constexpr = TILE // BLOCK
    half: tl.constexpr = TILE // 2
    height: tl.constexpr = BLOCK if SQUARE else 1
    split = tl.reshape(x, (TILE // height, height, blocks, BLOCK))
    amax = block_amax_or_nan(block_amax_or_nan(split, 3), 1)
    byte, encode = block_scale(amax, global_scale, global_inv, NATIVE)
    scaled = tl.reshape(split * encode[:, None, :, None], (TILE, TILE))
    codes = e2m1_codes(scaled, uniform, STOCHASTIC)
    low, high = tl.split(tl.reshape(codes, (TILE, half, 2)))
    packed = (low | (high << 4)).to(tl.uint8)
    r = first_row + tl.arange(0, TILE)
    pair = first_column // 2 + tl.arange(0, half)
    held = (r < rows)[:, None] & (pair < pairs)[None, :]
    tl.store(data + r[:, None] * pairs + pair[None, :], packed, mask=held)
    beside = tl.cdiv(columns, BLOCK)
    line = first_row // height + tl.arange(0, TILE // height)
    block = first_column // BLOCK + tl.arange(0, blocks)
    held = (line < tl.cdiv(rows, height))[:, None] & (block < beside)[None, :]
    tl.store(scales + line[:, None] * beside + block[None, :], byte, mask=held)


@triton.jit
def _load_tile(
    x,
    first_row,
    first_column,
    rows,
    columns,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """A tile of x in float32, where a thread has NEIGHBOURS rows beside each other."""
    apart: tl.constexpr = TILE // NEIGHBOURS
    i = tl.arange(0, TILE)
    dealt = first_row + (i % apart) * NEIGHBOURS + i // apart
    c = first_column + i
    inside = (dealt < rows)[:, None] & (c < columns)[None, :]
    at = x + dealt[:, None] * row_stride + c[None, :] * column_stride
    values = tl.reshape(tl.load(at, mask=inside, other=0.0), (NEIGHBOURS, apart, TILE))
    return widened(tl.reshape(tl.permute(values, (1, 0, 2)), (TILE, TILE)))


@triton.jit(do_not_specialize=["count", "seed_low", "seed_high", "offset_low", "offset_high"])
def _cast(
    x,
    parts,
    row,
    row_scale,
    col,
    col_scale,
    scale_inv,
    step,
    count,
    seed_low,
    seed_high,
    offset_low,
    offset_high,
    rows,
    columns,
    row_pairs,
    col_pairs,
    row_stride,
    column_stride,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FOURS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of x [rows, columns] in the usages whose tensors are not None."""
    tiles_beside = tl.cdiv(columns, TILE)
    first_row = (tl.program_id(0) // tiles_beside).to(tl.int64) * TILE
    first_column = (tl.program_id(0) % tiles_beside).to(tl.int64) * TILE
    scale = scale_from_amax(joined_amax(parts, count, PARTS), 2688.0)
    inverse = reciprocal(scale)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, inverse)
    values = _load_tile(
        x, first_row, first_column, rows, columns, row_stride, column_stride, TILE, NEIGHBOURS
    )
    seed, offset = words_to_int64(seed_low, seed_high), words_to_int64(offset_low, offset_high)
    if step is not None:
        offset += tl.load(step)
    uniform = values
    if row is not None:
        if STOCHASTIC:
            uniform = _uniform(first_row, first_column, columns, seed, offset, 0, TILE, FOURS)
        _store_tile(
            values, uniform, first_row, first_column, rows, columns, row_pairs,
            row, row_scale.to(_BYTES, bitcast=True), scale, inverse,
            TILE, BLOCK, SQUARE, STOCHASTIC, NATIVE,
        )  # fmt: skip
    if col is not None:
        if STOCHASTIC:
            uniform = _uniform(first_row, first_column, columns, seed, offset, 1, TILE, FOURS)
        _store_tile(
            tl.trans(values), tl.trans(uniform), first_column, first_row, columns, rows, col_pairs,
            col, col_scale.to(_BYTES, bitcast=True), scale, inverse,
            TILE, BLOCK, SQUARE, STOCHASTIC, NATIVE,
        )  # fmt: skip


@triton.jit
def _dequantize(
    data,
    scales,
    scale_inv,
    x,
    rows,
    columns,
    pairs,
    row_stride,
    pair_stride,
    line_stride,
    block_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of x; a block scale is for HEIGHT x BLOCK values."""
    half: tl.constexpr = COLUMNS // 2
    blocks: tl.constexpr = COLUMNS // BLOCK
    beside = tl.cdiv(columns, COLUMNS)
    tile_column = (tl.program_id(0) % beside).to(tl.int64)
    r = (tl.program_id(0) // beside).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tile_column * half + tl.arange(0, half)
    held = (r < rows)[:, None] & (pair < pairs)[None, :]
    at = data + r[:, None] * row_stride + pair[None, :] * pair_stride
    byte = tl.load(at, mask=held, other=0).to(tl.int32)
    values = tl.join(e2m1_values(byte & 15), e2m1_values(byte >> 4))
    block = tile_column * blocks + tl.arange(0, blocks)
    held = (r < rows)[:, None] & (block < tl.cdiv(columns, BLOCK))[None, :]
    at = (r // HEIGHT)[:, None] * line_stride + block[None, :] * block_stride
    scale = tl.load(scales.to(_BYTES, bitcast=True) + at, mask=held, other=0)
    factor = fp8_values(scale, False, NATIVE)
    product = tl.reshape(values, (ROWS, blocks, BLOCK)) * factor[:, :, None]
    whole = tl.reshape(product, (ROWS, COLUMNS)) * tl.load(scale_inv)
    c = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    result = narrowed(whole, x.dtype.element_ty, NATIVE)
    tl.store(x + r[:, None] * columns + c[None, :], result, mask=inside)


def nvfp4_cast(
    x: torch.Tensor,
    two_dimensional: bool,
    stochastic: bool,
    seed: int,
    offset: int,
    rowwise: bool,
    columnwise: bool,
    step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference."""
    rows, columns = x.shape
    row, row_scale = _empty_pair(x, rows, columns, two_dimensional, rowwise)
    col, col_scale = _empty_pair(x, columns, rows, two_dimensional, columnwise)
    if x.numel() == 0:
        inverse = torch.ones(1, dtype=torch.float32, device=x.device)
        return row, row_scale, col, col_scale, inverse
    inverse = torch.empty(1, dtype=torch.float32, device=x.device)
    parts = partial_amax(x, None, 0)
    native = is_native(_cast, x.device)
    launch_grid(
        _cast,
        (cdiv(rows, TILE) * cdiv(columns, TILE),),
        x,
        parts,
        row if rowwise else None,
        (row_scale if native else row_scale.view(torch.uint8)) if rowwise else None,
        col if columnwise else None,
        (col_scale if native else col_scale.view(torch.uint8)) if columnwise else None,
        inverse,
        step,
        parts.shape[0],
        *_words(seed),
        *_words(offset),
        rows,
        columns,
        cdiv(columns, 2),
        cdiv(rows, 2),
        *x.stride(),
        PARTS=PARTS,
        TILE=TILE,
        NEIGHBOURS=1 if x.stride(0) == 1 else NEIGHBOURS,
        BLOCK=BLOCK,
        SQUARE=two_dimensional,
        STOCHASTIC=stochastic,
        FOURS=columns % 4 == 0,
        NATIVE=native,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return row, row_scale, col, col_scale, inverse


def nvfp4_dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale_inv: torch.Tensor,
    two_dimensional: bool,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As the reference."""
    rows = data.shape[0]
    x = torch.empty((rows, columns), dtype=dtype, device=data.device)
    if x.numel() == 0:
        return x
    native = is_native(_cast, x.device)
    launch_grid(
        _dequantize,
        (cdiv(rows, DEQUANTIZE_ROWS) * cdiv(columns, DEQUANTIZE_COLUMNS),),
        data,
        scale if native else scale.view(torch.uint8),
        global_scale_inv,
        x,
        rows,
        columns,
        data.shape[1],
        *data.stride(),
        *scale.stride(),
        ROWS=DEQUANTIZE_ROWS,
        COLUMNS=DEQUANTIZE_COLUMNS,
        BLOCK=BLOCK,
        HEIGHT=BLOCK if two_dimensional else 1,
        NATIVE=native,
        num_warps=DEQUANTIZE_WARPS,
        enable_fp_fusion=False,
    )
    return x


def _empty_pair(
    x: torch.Tensor, lines: int, length: int, two_dimensional: bool, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scales of one usage; of size 0 where not asked for."""
    data = (lines, cdiv(length, 2)) if wanted else (0,)
    scales = (cdiv(lines, BLOCK) if two_dimensional else lines, cdiv(length, BLOCK))
    return (
        torch.empty(data, dtype=torch.uint8, device=x.device),
        torch.empty(scales if wanted else (0,), dtype=E4M3, device=x.device),
    )


def _words(number: int) -> tuple[int, int]:
    """The lower and the upper 32 bits, as int32: Triton compiles anew for wider numbers."""
    low, high = number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000
