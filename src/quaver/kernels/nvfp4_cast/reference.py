"""Casting to NVFP4 and back, written out as a specification.

After NVIDIA, "Pretraining Large Language Models with NVFP4", 2025: 4-bit values (E2M1), a scale in
E4M3 for each block of 16 of them, and one float32 scale for the tensor. The bits are defined by
these float32 operations, each rounded to nearest even on its own:

- amax = max|x| without NaN; global = 2688 / amax (2688 = 448 * 6), the largest float32 where that
  overflows, 1 where amax is 0 or inf; global_scale_inv = 1 / global.
- For each block: block_scale = E4M3(min((block_amax / 6) * global, 448));
  encode = min(1 / (block_scale * global_scale_inv), the largest float32).
- q = E2M1(clamp(x * encode, -6, 6)).
- Back: x = (q * block_scale) * global_scale_inv, where the first product is exact.

E2M1(v) rounds to nearest even and keeps the sign of zero. If stochastic, it rounds v, which lies
the fraction f of a step above its lower neighbour in magnitude, away from zero where u < f, with
u = (bits div 2^8) / 2^24 and `bits` those of `random_bits` for seed, offset and the index m * K + k
of the element in x [M, K]; stream 0 for the row-wise and 1 for the column-wise results.

A block of zeros has block_scale 0 and is 0. So is, once dequantized, a block so much smaller than
amax that its scale rounds to 0 (its payload, mostly ±6, comes of encode = the largest float32).
inf saturates: it becomes ±6 under a block scale of 448. E2M1 has no NaN: a NaN makes the scale of
its block NaN, and the payload there 0, so that all of the block is NaN once dequantized.
"""

from typing import Final

import torch

from quaver.formats import E4M3, FLOAT32_MAX, MAX
from quaver.kernels.amax.reference import max_abs
from quaver.kernels.cast.reference import divide, scale_from_amax
from quaver.kernels.nvfp4_cast.e2m1 import E2M1_MAX, decode, encode, pack, unpack
from quaver.kernels.random_bits.reference import random_bits

BLOCK: Final = 16
"""Values under one block scale, along the row, or along both dimensions."""

_TILE_ROWS = 64  # a multiple of BLOCK; tiles of this size stay in the CPU's cache
_ROWWISE, _COLUMNWISE = 0, 1  # streams of random bits

_Pair = tuple[torch.Tensor, torch.Tensor]


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
    """x ≈ q * block_scale * global_scale_inv, with q in E2M1 and block_scale in E4M3.

    The head of quaver/kernels/nvfp4_cast/reference.py says how the scales are found, what is
    rounded when, and what becomes of 0, inf and NaN: all that defines the bits.

    Args:
        x: [M, K], float32, bfloat16 or float16, any strides.
        two_dimensional: blocks of 16×16 instead of 1×16; short ones at ragged edges in both cases.
        stochastic: round E2M1 at random instead of to nearest even.
        seed, offset: of the random bits; an offset is to be used for one cast only.
        rowwise: whether the first two results are made, empty [0] otherwise.
        columnwise: the same for the two after them, which are the row-wise ones of x's transpose.
        step: int64 [1], added to the offset; a number that the host need not know.

    Returns:
        row_data: uint8 [M, ceil(K/2)], the value with the even index in the low four bits; where
            K is odd, the last four bits of a row are 0.
        row_scale: float8_e4m3fn [M, ceil(K/16)]; [ceil(M/16), ceil(K/16)] if two-dimensional.
        col_data: uint8 [K, ceil(M/2)].
        col_scale: float8_e4m3fn [K, ceil(M/16)]; [ceil(K/16), ceil(M/16)] if two-dimensional.
        global_scale_inv: float32 [1].
    """
    tiles = x.split(_TILE_ROWS)
    amax = torch.stack([max_abs(tile) for tile in tiles]).amax()
    scale = scale_from_amax(amax, MAX[E4M3] * E2M1_MAX)
    scales = scale, divide(1.0, scale)
    height = BLOCK if two_dimensional else 1

    def bits(i: int, stream: int) -> torch.Tensor | None:
        if not stochastic:
            return None
        start, shape = i * _TILE_ROWS * x.shape[1], tiles[i].shape
        number = offset if step is None else offset + step
        return random_bits(start, shape.numel(), seed, number, stream, x.device).view(shape)

    rows, cols = [], []
    for i, tile in enumerate(tiles):
        if rowwise:
            rows.append(_cast_tile(tile, height, scales, bits(i, _ROWWISE)))
        if columnwise:
            drawn = bits(i, _COLUMNWISE)
            cols.append(_cast_tile(tile.t(), height, scales, None if drawn is None else drawn.t()))
    return *_join(rows, 0, x), *_join(cols, 1, x), scales[1].view(1)


def nvfp4_dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale_inv: torch.Tensor,
    two_dimensional: bool,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x = (q * block_scale) * global_scale_inv in float32, rounded once to `dtype`.

    From column-wise data it is the transpose that comes back.

    Args:
        data: uint8 [M, ceil(columns/2)], as `nvfp4_cast` returns it.
        scale: float8_e4m3fn [M, ceil(columns/16)]; [ceil(M/16), ceil(columns/16)] if
            two-dimensional.
        global_scale_inv: float32 [1].
        two_dimensional: as given to the cast.
        columns: K of the row-wise, M of the column-wise payload.
        dtype: of the result.

    Returns:
        [M, columns], contiguous.
    """
    height = BLOCK if two_dimensional else 1
    factors = scale.to(torch.float32)
    tiles = [
        _dequantize_tile(payload, factor, global_scale_inv, height, columns).to(dtype)
        for payload, factor in zip(
            data.split(_TILE_ROWS), factors.split(_TILE_ROWS // height), strict=True
        )
    ]
    return torch.cat(tiles)


def _cast_tile(
    tile: torch.Tensor,
    height: int,
    global_scales: _Pair,
    bits: torch.Tensor | None,
) -> _Pair:
    """Payload and scales of [R, C], whose blocks are of `height` rows by 16 columns.

    The global scales are the one that multiplies before the cast and its inverse.
    """
    scale, scale_inv = global_scales
    rows, columns = tile.shape
    blocks = _blocks(tile.contiguous().to(torch.float32), height)
    amax = _block_amax(blocks)
    decode_scale = ((amax / torch.full_like(amax, E2M1_MAX)) * scale).clamp(max=MAX[E4M3]).to(E4M3)
    encode_scale = divide(1.0, decode_scale.to(torch.float32) * scale_inv).clamp(max=FLOAT32_MAX)
    codes = encode(
        blocks * encode_scale, None if bits is None else _blocks(bits.contiguous(), height)
    )
    payload = pack(codes.view(codes.shape[0] * height, codes.shape[2] * BLOCK))
    return payload[:rows, : (columns + 1) // 2], decode_scale[:, 0, :, 0]


def _dequantize_tile(
    payload: torch.Tensor,
    factor: torch.Tensor,
    scale_inv: torch.Tensor,
    height: int,
    columns: int,
) -> torch.Tensor:
    values = decode(unpack(payload)[:, :columns])
    blocks = _blocks(values, height)
    whole = (blocks * factor[:, None, :, None]).mul_(scale_inv)
    rows = payload.shape[0]
    return whole.view(whole.shape[0] * height, whole.shape[2] * BLOCK)[:rows, :columns]


def _blocks(tile: torch.Tensor, height: int) -> torch.Tensor:
    """[R, C] as [block rows, height, block columns, 16]; short blocks are filled with zeros."""
    below, right = -tile.shape[0] % height, -tile.shape[1] % BLOCK
    if below or right:  # pad copies in every case
        tile = torch.nn.functional.pad(tile, (0, right, 0, below))
    rows, columns = tile.shape
    return tile.reshape(rows // height, height, columns // BLOCK, BLOCK)


def _block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """max|x| of each block, [block rows, 1, block columns, 1]; NaN where the block has a NaN.

    Taken over the bits: without the sign they are in the order of the magnitudes, NaN above inf.
    """
    magnitudes = blocks.view(torch.int32) & 0x7FFFFFFF
    return magnitudes.amax(dim=(1, 3), keepdim=True).view(torch.float32)


def _join(tiles: list[_Pair], dim: int, x: torch.Tensor) -> _Pair:
    """The tiles' payloads and scales, each joined along `dim`; empty ones if there are none."""
    if not tiles:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=E4M3)
    data, scale = zip(*tiles, strict=True)
    return torch.cat(data, dim), torch.cat(scale, dim)
