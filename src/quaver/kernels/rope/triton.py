"""`rope` in Triton: a program for a token and some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quaver.kernels.common.triton_launch import (
    cdiv,
    is_interpreted,
    launch_grid,
    next_power_of_two,
)
from quaver.kernels.common.triton_numbers import narrowed
from quaver.kernels.rope.reference import check_rope

PAIRS_A_PROGRAM = 1024
WARPS = 4


@triton.jit(do_not_specialize=["places", "heads"])
def _rope(
    x, cos, sin, positions, y, places, heads, token_stride, head_stride, column_stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    NATIVE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    within = (head < heads)[:, None]
    source = (token * token_stride + head.to(tl.int64) * head_stride)[:, None]
    target = ((token * heads + head) * WIDTH)[:, None]
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    position = tl.load(positions + token) + tl.zeros([BLOCK], tl.int64)
    known = inside & (position >= 0) & (position < places)  # beyond the table there is only NaN
    row = position * (2 * HALF)
    nan = float("nan")
    cos_first = tl.load(cos + row + first, mask=known, other=nan)[None, :]
    cos_second = tl.load(cos + row + second, mask=known, other=nan)[None, :]
    sin_first = tl.load(sin + row + first, mask=known, other=nan)[None, :]
    sin_second = tl.load(sin + row + second, mask=known, other=nan)[None, :]
    mask = within & inside[None, :]
    a = tl.load(x + source + first[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + source + second[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
    if TRANSPOSED:
        one = a * cos_first + b * sin_second
        two = b * cos_second - a * sin_first
    else:
        one = a * cos_first - b * sin_first
        two = b * cos_second + a * sin_second
    kind = y.dtype.element_ty
    tl.store(y + target + first[None, :], narrowed(one, kind, NATIVE), mask=mask)
    tl.store(y + target + second[None, :], narrowed(two, kind, NATIVE), mask=mask)
    if WIDTH > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, TAIL)
        mask = within & (rest < WIDTH)[None, :]
        kept = tl.load(x + source + rest[None, :] * column_stride, mask=mask)
        tl.store(y + target + rest[None, :], kept, mask=mask)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    transposed: bool = False,
) -> torch.Tensor:
    """As the reference; a position beyond the table gives NaN."""
    check_rope(x, cos, sin, positions)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    tokens, heads, width = x.shape
    half = cos.shape[1] // 2
    block = next_power_of_two(half)
    together = min(next_power_of_two(heads), max(1, PAIRS_A_PROGRAM // block))
    launch_grid(
        _rope,
        (tokens, cdiv(heads, together)),
        x,
        cos,
        sin,
        positions,
        y,
        cos.shape[0],
        heads,
        *x.stride(),
        WIDTH=width,
        HALF=half,
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        NATIVE=not is_interpreted(_rope),
        HEADS=together,
        BLOCK=block,
        TAIL=next_power_of_two(width - 2 * half),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return y
