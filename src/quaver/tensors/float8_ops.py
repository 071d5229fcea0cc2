"""The torch operations that keep a Float8Tensor quantized.

detach, alias, clone, views, transposition, moves between devices and changes of the nominal dtype,
`empty_like`, `copy_` (re-quantizes), `equal` (payload and scale).
"""

from __future__ import annotations

from typing import Any

import torch

from quaver.tensors.base import plain
from quaver.tensors.float8 import Float8Tensor, map_payload, rebuild

aten = torch.ops.aten


def _keep(func: Any, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
    return map_payload(tensor, lambda part: func(part, *args, **kwargs))


def _share(func: Any, tensor: Float8Tensor, *args: Any) -> Float8Tensor:
    return map_payload(tensor, lambda part: part)


def _to_copy(func: Any, tensor: Float8Tensor, **kwargs: Any) -> Float8Tensor:
    dtype = kwargs.pop("dtype", None)
    moved = map_payload(tensor, lambda part: func(part, **kwargs), dtype)
    if moved.quantizer is not None and moved.device != tensor.device:
        moved.quantizer = moved.quantizer.to(moved.device)
    return moved


def _empty_like(func: Any, tensor: Float8Tensor, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.pop("dtype", None)
    return map_payload(tensor, lambda part: func(part, **kwargs), dtype)


def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, Float8Tensor):
        return target.copy_(source.dequantize(), non_blocking=non_blocking)
    target.refuse_write_to_view()
    if isinstance(source, Float8Tensor) and source.fp8_dtype == target.fp8_dtype:
        data, scale_inv = source.payload()
        if target.rowwise_data is not None:
            target.rowwise_data.copy_(data, non_blocking=non_blocking)
        if target.columnwise_data is not None:
            rows = target.columnwise_data.shape[::-1]
            target.columnwise_data.copy_(data.reshape(rows).t(), non_blocking=non_blocking)
        target.rowwise_scale_inv.copy_(scale_inv, non_blocking=non_blocking)
        return target
    target.assign(plain(source).to(target.device).expand(target.shape))
    return target


def _view(func: Any, tensor: Float8Tensor, *args: Any) -> Float8Tensor:
    """One scale serves all values, so every view of the row-wise payload is one of the tensor."""
    data, scale_inv = tensor.payload()
    viewed = func(data, *args)
    columnwise = tensor.columnwise_data
    if viewed.shape[-1:] != tensor.shape[-1:] or viewed.numel() != tensor.numel():
        columnwise = None
    view = rebuild(viewed, scale_inv, columnwise, tensor.dtype, viewed.shape, None)
    view.is_payload_view = True
    return view


def _transpose(func: Any, tensor: Float8Tensor, *args: Any) -> Float8Tensor:
    data, scale_inv = tensor.payload()
    turned = func(data, *args)
    view = rebuild(turned, scale_inv, None, tensor.dtype, turned.shape, None)
    view.is_payload_view = True
    return view


def _equal(func: Any, left: Any, right: Any) -> bool:
    if isinstance(left, Float8Tensor) and isinstance(right, Float8Tensor):
        a, b = left.payload(), right.payload()
        same_scale = torch.equal(a.scale_inv, b.scale_inv)
        return same_scale and torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    return torch.equal(*plain((left, right)))


Float8Tensor.handlers.update(
    {
        aten.detach.default: _share,
        aten.alias.default: _share,
        aten.clone.default: _keep,
        aten._to_copy.default: _to_copy,
        aten.empty_like.default: _empty_like,
        aten.copy_.default: _copy,
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten.unsqueeze.default: _view,
        aten.squeeze.dim: _view,
        aten.slice.Tensor: _view,
        aten.select.int: _view,
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.permute.default: _transpose,
        aten.equal.default: _equal,
    }
)
