"""Quantizing a matrix in blocks of any size, each with its scale: what block formats share."""

from collections.abc import Callable

import torch

from quaver.formats import MAX
from quaver.kernels.current_cast.reference import saturate_
from quaver.kernels.current_cast.tiles import row_tiles, store_transposed

Block = tuple[int, int]
"""Rows and columns of a block."""

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Row-wise payload and stored scales, column-wise payload and stored scales."""

ScaleRule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From amaxes, float32, to (scales that multiply before the cast, float32; scales to be stored)."""


def block_counts(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """How many blocks, the short last ones included, lie below and beside each other."""
    return -(-rows // block[0]), -(-columns // block[1])


def empty_usages(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: Block,
    scale_dtype: torch.dtype,
    usages: tuple[bool, bool],
) -> Results:
    """Tensors for what `cast_usages` returns; of size 0 where not asked for."""
    rows, columns = x.shape
    shapes: list[tuple[int, ...]] = []
    for wanted, shape in zip(usages, ((rows, columns), (columns, rows)), strict=True):
        shapes += (shape, block_counts(*shape, block)) if wanted else ((0,), (0,))
    row, row_scale, col, col_scale = (
        torch.empty(shape, dtype=kind, device=x.device)
        for shape, kind in zip(shapes, 2 * (dtype, scale_dtype), strict=True)
    )
    return row, row_scale, col, col_scale


def cast_usages(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: Block,
    rule: ScaleRule,
    scale_dtype: torch.dtype,
    usages: tuple[bool, bool],
) -> Results:
    """q = saturate(x * scale), rounded to nearest even, with a scale for each block's amax.

    An amax passes over NaN, and inf counts; a block without anything else has amax 0. Column-wise
    is row-wise of the transpose, which is not made: its blocks are x's, turned.

    Args:
        x: [M, K], any strides.
        dtype: of the payloads.
        block: in x for the row-wise usage, in the transpose for the column-wise one.
        rule: gives the scales.
        scale_dtype: of the scales to be stored.
        usages: whether row-wise, whether column-wise.

    Returns:
        Payload [M, K] and stored scales [ceil(M / rows), ceil(K / columns)]; payload [K, M] and
        stored scales [ceil(K / rows), ceil(M / columns)]. Contiguous; empty where not asked for.
    """
    row, row_scale, col, col_scale = empty_usages(x, dtype, block, scale_dtype, usages)
    upright, turned = _fitted(block, x), _fitted((block[1], block[0]), x)
    shapes = {shape for shape, wanted in zip((upright, turned), usages, strict=True) if wanted}
    whole = max((height for height, _ in shapes), default=1), max((w for _, w in shapes), default=1)
    for tile in row_tiles(x, whole[0]):
        values = _filled(x[tile], whole)
        work = values.abs().nan_to_num_(nan=0.0, posinf=torch.inf)
        scales = {shape: rule(_block_amax(work, shape)) for shape in shapes}
        for shape, (scale, stored) in scales.items():
            scaled = saturate_(_scaled(values, scale, shape, work), MAX[dtype])
            held = scaled[: tile.stop - tile.start, : x.shape[1]]
            below, beside = block_counts(held.shape[0], held.shape[1], shape)
            if usages[0] and shape == upright:
                row[tile] = held
                row_scale[_block_rows(tile, shape)] = stored[:below, :beside]
            if usages[1] and shape == turned:
                store_transposed(held.to(dtype), col, tile)
                store_transposed(stored[:below, :beside], col_scale, _block_rows(tile, shape))
    return row, row_scale, col, col_scale


def dequantize_blocks(
    data: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """x = q * scale, computed in float32, rounded once to `dtype`.

    Args:
        data: [M, K], an FP8 dtype, any strides.
        scale: float32 [ceil(M / rows), ceil(K / columns)].
        block: of one scale.
        dtype: of the result [M, K], which is contiguous.
    """
    x = torch.empty(data.shape, dtype=dtype, device=data.device)
    block = _fitted(block, data)
    for tile in row_tiles(data, block[0]):
        values = _filled(data[tile], block)
        _scaled(values, scale[_block_rows(tile, block)], block, values)
        x[tile] = values[: tile.stop - tile.start, : data.shape[1]]
    return x


def _fitted(block: Block, x: torch.Tensor) -> Block:
    """`block`, but no larger than x: less to fill, and the same blocks."""
    return max(min(block[0], x.shape[0]), 1), max(min(block[1], x.shape[1]), 1)


def _filled(x: torch.Tensor, block: Block) -> torch.Tensor:
    """x in float32, contiguous, with zeros that fill the short last blocks.

    It may share memory with x, if x is float32.
    """
    below, beside = block_counts(x.shape[0], x.shape[1], block)
    missing = (0, beside * block[1] - x.shape[1], 0, below * block[0] - x.shape[0])
    values = x.to(torch.float32)
    if any(missing):
        values = torch.nn.functional.pad(values, missing)
    return values.contiguous()


def _split(x: torch.Tensor, block: Block) -> torch.Tensor:
    """x of whole blocks as [blocks, rows of a block, blocks, columns of a block]."""
    height, width = block
    return x.view(x.shape[0] // height, height, x.shape[1] // width, width)


def _block_amax(magnitude: torch.Tensor, block: Block) -> torch.Tensor:
    """The largest value of each block [blocks, blocks] of a matrix of whole blocks."""
    blocks = _split(magnitude, block)
    # Over a dimension of one value a maximum would be slow, and do nothing.
    across = blocks.amax(3) if block[1] > 1 else blocks.squeeze(3)
    return across.amax(1) if block[0] > 1 else across.squeeze(1)


def _scaled(x: torch.Tensor, scale: torch.Tensor, block: Block, into: torch.Tensor) -> torch.Tensor:
    """A matrix of whole blocks times the scales [blocks, blocks], written to `into` of x's shape.

    New memory for each tile would cost more time than the product.
    """
    torch.mul(_split(x, block), scale[:, None, :, None], out=_split(into, block))
    return into


def _block_rows(tile: slice, block: Block) -> slice:
    """The rows of blocks that the rows `tile` make up."""
    return slice(tile.start // block[0], -(-tile.stop // block[0]))
