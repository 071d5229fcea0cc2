"""Quantizing a matrix in blocks of any size, each with its scale: what block formats share."""

from collections.abc import Callable, Iterable

import torch

from quaver.devices import runs_triton
from quaver.formats import MAX
from quaver.kernels.current_cast.reference import saturate_
from quaver.kernels.current_cast.tiles import row_tiles, store_transposed

Block = tuple[int, int]
"""Rows and columns of a block."""

Usages = tuple[bool, bool]
"""Whether row-wise, whether column-wise."""

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Row-wise payload and stored scales, column-wise payload and stored scales."""

ScaleRule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From amaxes, float32, to (scales that multiply before the cast, float32; scales to be stored).

A finite amax times its scale must round to no more than the format's largest value.
"""


def block_counts(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """How many blocks, the short last ones included, lie below and beside each other."""
    return -(-rows // block[0]), -(-columns // block[1])


def empty_usages(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: Block,
    scale_dtype: torch.dtype,
    usages: Usages,
) -> Results:
    """Tensors for what `cast_usages` returns; of size 0 where not asked for.

    On GPUs the float32 scales of 1xN values lie by blocks in memory, as cuBLASLt reads them.
    """
    rows, columns = x.shape
    by_block = block[0] == 1 and scale_dtype == torch.float32 and runs_triton(x.device.type)
    results: list[torch.Tensor] = []
    for wanted, shape in zip(usages, ((rows, columns), (columns, rows)), strict=True):
        counts = block_counts(*shape, block)
        scale_shape = counts[::-1] if by_block else counts
        for kind, size in ((dtype, shape), (scale_dtype, scale_shape)):
            results.append(torch.empty(size if wanted else (0,), dtype=kind, device=x.device))
        if wanted and by_block:
            results[-1] = results[-1].t()
    return results[0], results[1], results[2], results[3]


def cast_usages(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: Block,
    rule: ScaleRule,
    scale_dtype: torch.dtype,
    usages: Usages,
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
    results = empty_usages(x, dtype, block, scale_dtype, usages)
    upright, turned = _fitted(block, x), _fitted((block[1], block[0]), x)
    shapes: dict[Block, Usages] = {}
    if usages[0]:
        shapes[upright] = (True, usages[1] and upright == turned)
    if usages[1]:
        shapes.setdefault(turned, (False, True))
    if shapes:
        for tile in row_tiles(x, max(height for height, _ in shapes)):
            _cast_tile(x, tile, shapes, rule, results)
    return results


def _cast_tile(
    x: torch.Tensor, tile: slice, shapes: dict[Block, Usages], rule: ScaleRule, results: Results
) -> None:
    """`cast_usages` for the rows `tile`.

    A function of its own, so that the next tile takes this one's memory, which is in the cache.

    Args:
        shapes: of blocks in x, with the usages that have them.
        results: those of all rows, written to.
    """
    row, row_scale, col, col_scale = results
    whole = max(height for height, _ in shapes), max(width for _, width in shapes)
    values = _filled(x[tile], whole)
    work, amaxes, finite = _magnitudes(values, shapes)
    scales = {shape: rule(amax) for shape, amax in amaxes.items()}  # an amax may be part of work
    for shape, (rowwise, columnwise) in shapes.items():
        scale, stored = scales[shape]
        scaled = _scaled(values, scale, shape, work)
        if not finite:
            saturate_(scaled, MAX[row.dtype])
        held = scaled[: tile.stop - tile.start, : x.shape[1]]
        below, beside = block_counts(held.shape[0], held.shape[1], shape)
        if rowwise:
            row[tile] = held
            row_scale[_block_rows(tile, shape)] = stored[:below, :beside]
        if columnwise:
            store_transposed(held.to(col.dtype), col, tile)
            store_transposed(stored[:below, :beside], col_scale, _block_rows(tile, shape))


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


def _magnitudes(
    values: torch.Tensor, shapes: Iterable[Block]
) -> tuple[torch.Tensor, dict[Block, torch.Tensor], bool]:
    """|values|, the amaxes of its blocks of each shape, whether all values are known to be finite.

    On a CPU the amaxes are looked at, which spares a tile without NaN and inf several passes;
    another device would have to be waited for.
    """
    work = values.abs()
    if work.device.type == "cpu" and work.numel():
        amaxes = {shape: _block_amax(work, shape) for shape in shapes}
        if next(iter(amaxes.values())).amax().item() < torch.inf:
            return work, amaxes, True
    work.nan_to_num_(nan=0.0, posinf=torch.inf)
    return work, {shape: _block_amax(work, shape) for shape in shapes}, False


def _scaled(x: torch.Tensor, scale: torch.Tensor, block: Block, into: torch.Tensor) -> torch.Tensor:
    """A matrix of whole blocks times the scales [blocks, blocks], written to `into` of x's shape.

    New memory for each tile would cost more time than the product.
    """
    torch.mul(_split(x, block), scale[:, None, :, None], out=_split(into, block))
    return into


def _block_rows(tile: slice, block: Block) -> slice:
    """The rows of blocks that the rows `tile` make up."""
    return slice(tile.start // block[0], -(-tile.stop // block[0]))
