"""Quantized weights from their masters: one pass where the format has one scale a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from quaver.devices import group_by_device, on_device
from quaver.kernels import multi_cast
from quaver.quantizers import Float8CurrentScalingQuantizer
from quaver.tensors import Float8Tensor, QuantizedTensor

Pair = tuple[QuantizedTensor, torch.Tensor]
"""A weight and its master, on one device."""


class _Format(NamedTuple):
    """What weights have in common that one launch quantizes."""

    dtype: torch.dtype
    power_2: bool
    epsilon: float
    rowwise: bool
    columnwise: bool


@torch.no_grad()
def requantize(pairs: Iterable[Pair]) -> None:
    """Quantize each weight anew from its master, in place, with its own quantizer.

    All weights of a device and a format with one scale a tensor, of their own amax, are quantized
    in one launch. The others are quantized one by one: those in blocks, those whose quantizer was
    given a scale, and those whose amax is reduced over other ranks. The bytes are the same.
    """
    for device, here in group_by_device(pairs, lambda pair: pair[1].device).items():
        with on_device(device):
            together: dict[_Format, list[Pair]] = {}
            for weight, master in here:
                kind = _format(weight)
                if kind is None:
                    weight.copy_(master)
                else:
                    together.setdefault(kind, []).append((weight, master))
            for kind, some in together.items():
                _quantize_together(kind, some)


def _format(weight: QuantizedTensor) -> _Format | None:
    """The format, if the weights of it can be quantized together; else None."""
    if not isinstance(weight, Float8Tensor) or weight.is_payload_view:
        return None
    quantizer = weight.quantizer
    dtype, held = weight.fp8_dtype, weight.held()
    if quantizer is None:
        return _Format(dtype, False, 0.0, *held)
    if type(quantizer) is not Float8CurrentScalingQuantizer or quantizer.dtype != dtype:
        return None
    reduces = quantizer.amax_reduction_group is not None or (
        quantizer.reduces_over_region and dist.is_available() and dist.is_initialized()
    )
    if reduces:
        return None
    return _Format(dtype, quantizer.power_2_scale, quantizer.amax_epsilon, *held)


def _quantize_together(kind: _Format, pairs: list[Pair]) -> None:
    parts = [weight.parts() for weight, _ in pairs]
    multi_cast(
        [master for _, master in pairs],
        [part["rowwise_data"] for part in parts] if kind.rowwise else [],
        [part["columnwise_data"] for part in parts] if kind.columnwise else [],
        [part["rowwise_scale_inv"] for part in parts],
        kind.dtype,
        kind.power_2,
        kind.epsilon,
    )
    # As `copy_` would have done: autograd must notice that what it saved has changed.
    torch.autograd.graph.increment_version([weight for weight, _ in pairs])
