"""Tiles of rows, over which the references of the casts loop."""

from collections.abc import Iterator

import torch

TILE_VALUES = 2**20
"""About how many values a tile has: 4 MB of float32, which stay in a processor's cache.

Smaller ones are no faster, and each pass over a tile makes all threads wait for the last.
"""

_WORD = 4
"""Bytes in an int32; the first one is the lowest on every processor that torch runs on."""


def row_tiles(x: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover the rows of x [M, K] in order; at least one, which may be empty.

    Where a launch costs more than a cache saves, that is off the CPU, one slice covers all rows.

    Args:
        x: whose shape and device count.
        multiple: no slice but the last has a length that this does not divide.
    """
    rows, columns = x.shape
    tile = max(TILE_VALUES // max(columns, 1) // multiple, 1) * multiple
    if x.device.type != "cpu":
        tile = max(rows, 1)
    for start in range(0, max(rows, 1), tile):
        yield slice(start, min(start + tile, rows))


def store_transposed(x: torch.Tensor, into: torch.Tensor, tile: slice) -> None:
    """into[:, tile] = x's transpose; by way of a contiguous copy, which is several times faster.

    Bytes in rows of whole words are turned as words on a CPU, which are then taken apart: torch
    turns on one thread, whatever the size of the values.
    """
    columns = x.shape[1]
    words = x.is_contiguous() and x.itemsize == 1 and columns % _WORD == 0 and columns > 0
    if x.device.type != "cpu" or not words:
        into[:, tile] = x.t().contiguous()
        return
    # Flat first: a dimension of one value may have any stride.
    turned = x.view(torch.int32).t().contiguous().reshape(-1).view(torch.uint8)
    bytes_of = turned.view(columns // _WORD, x.shape[0], _WORD)
    parts = into.view(torch.uint8).view(columns // _WORD, _WORD, into.shape[1])
    parts[:, :, tile] = bytes_of.transpose(1, 2)
