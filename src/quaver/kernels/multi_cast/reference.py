"""`current_cast` of many tensors in one launch, into memory they have, as a specification."""

from collections.abc import Iterator, Sequence

import torch

from quaver.formats import MAX
from quaver.kernels.cast.reference import divide
from quaver.kernels.current_cast.reference import current_scale, saturate_

CHUNK_VALUES = 2**25
"""About how many values are cast at a time: what they need meanwhile is some 300 MB."""


def multi_cast(
    xs: list[torch.Tensor],
    data: list[torch.Tensor],
    transposed: list[torch.Tensor],
    scale_inv: list[torch.Tensor],
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
) -> None:
    """For each x what `current_cast` gives, with the scale of its own amax.

    The number of torch's operations does not depend on the number of tensors, but for those of
    `torch._foreach_*` that copy to other dtypes or strides.

    Args:
        xs: of any shapes and strides, float32, bfloat16 or float16.
        data: written; the payloads, of `dtype` and the shapes of xs. None at all: not wanted.
        transposed: written; the payloads [K, M] of each x [..., K]. None at all: not wanted.
        scale_inv: written; float32 [1] each.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_2, epsilon: as in `current_cast`.
    """
    for some in _chunks(xs):
        parts, inverse = _cast_chunk(xs[some], dtype, power_2, epsilon)
        torch._foreach_copy_(scale_inv[some], list(inverse.split(1)))
        if data:
            targets = data[some]
            _copy(targets, [p.view(t.shape) for p, t in zip(parts, targets, strict=True)])
        if transposed:
            targets = transposed[some]
            turned = [p.view(t.shape[::-1]).t() for p, t in zip(parts, targets, strict=True)]
            _copy(targets, turned)


def _cast_chunk(
    xs: list[torch.Tensor], dtype: torch.dtype, power_2: bool, epsilon: float
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """The flat payload of each x, as bytes, and scale_inv [number of xs]."""
    limit = MAX[dtype]
    sizes = [x.numel() for x in xs]
    wide = torch.cat([x.reshape(-1).to(torch.float32) for x in xs])
    magnitudes = wide.abs().nan_to_num_(nan=0.0, posinf=torch.inf).split(sizes)
    filled = [part for part in magnitudes if part.numel()]
    largest = iter(torch._foreach_max(filled) if filled else ())
    nothing = wide.new_zeros(())
    amaxes = torch.stack([next(largest) if size else nothing for size in sizes])
    scale = current_scale(amaxes, limit, power_2, epsilon)
    lengths = torch.tensor(sizes, device=wide.device)
    wide.mul_(torch.repeat_interleave(scale, lengths, output_size=wide.numel()))
    payload = saturate_(wide, limit).to(dtype).view(torch.uint8)
    return payload.split(sizes), divide(1.0, scale)


def _copy(targets: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    """Bytes into FP8 tensors."""
    torch._foreach_copy_([target.view(torch.uint8) for target in targets], parts)


def _chunks(xs: list[torch.Tensor]) -> Iterator[slice]:
    """Runs of xs with CHUNK_VALUES values or one tensor, in order."""
    start = total = 0
    for i, x in enumerate(xs):
        if i > start and total + x.numel() > CHUNK_VALUES:
            yield slice(start, i)
            start, total = i, 0
        total += x.numel()
    if start < len(xs):
        yield slice(start, len(xs))
