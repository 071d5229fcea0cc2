"""The torch operations that keep a tensor quantized.

detach, alias, clone, moves between devices and changes of the nominal dtype, `empty_like`, `copy_`
(re-quantizes), `equal` (payload and scales), transposition, and the views that the classes have:
any of a Float8Tensor, those that keep whole rows or blocks of the others. A view shares its
tensor's payload and cannot be written to; other views are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from quaver.tensors.base import Handler, QuantizedTensor
from quaver.tensors.payload import Operand

aten = torch.ops.aten


def _plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _share(func: Any, tensor: QuantizedTensor, *args: Any) -> QuantizedTensor:
    return tensor.like(tensor.parts())


def _keep(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise NotImplementedError(
            f"the nominal dtype of a {type(tensor).__name__} is a high-precision one, not {dtype}; "
            "call `.dequantize()` first"
        )
    return tensor.mapped(lambda part: func(part, *args, **kwargs), dtype)


def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(), non_blocking=non_blocking)
    target.refuse_write_to_view()
    if isinstance(source, QuantizedTensor) and target.same_format(source):
        rowwise, columnwise = target.held()
        quantized = source.quantized(rowwise=rowwise, columnwise=columnwise)
        target.write(quantized, non_blocking)
        return target
    target.assign(_plain(source).to(target.device).expand(target.shape))
    return target


def _new_zeros(func: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> torch.Tensor:
    """Zeros, quantized as `tensor` is, with the same last dimension (FSDP2 shards by it)."""
    shape = torch.Size(size)
    zeros = torch.zeros(
        shape,
        dtype=kwargs.get("dtype") or tensor.dtype,
        device=kwargs.get("device") or tensor.device,
    )
    if kwargs.get("dtype") or shape[-1:] != tensor.shape[-1:]:
        return zeros
    rows = zeros.reshape(math.prod(shape[:-1]), shape[-1])
    parts = tensor.parts_of(tensor.quantize_rows(rows, *tensor.held()))
    return tensor.like(parts, shape=shape, is_view=False)


def _view(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor.viewed(func, args, kwargs)


def _equal(func: Any, left: Any, right: Any) -> bool:
    both = isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor)
    if both and left.same_format(right):
        pairs = zip(left.operands(), right.operands(), strict=True)
        shared = [(a, b) for a, b in pairs if a is not None and b is not None]
        if shared:
            return all(_same_operand(a, b) for a, b in shared)
    return torch.equal(_plain(left), _plain(right))


def _same_operand(left: Operand, right: Operand) -> bool:
    pairs = [
        (left.data, right.data),
        (left.scale_inv, right.scale_inv),
        (left.global_scale_inv, right.global_scale_inv),
    ]
    return all(
        torch.equal(_bytes(a), _bytes(b)) for a, b in pairs if a is not None and b is not None
    )


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8)


_HANDLERS: dict[Any, Handler] = {
    aten.detach.default: _share,
    aten.alias.default: _share,
    aten.clone.default: _keep,
    aten._to_copy.default: _keep,
    aten.empty_like.default: _keep,
    aten.new_zeros.default: _new_zeros,
    aten.copy_.default: _copy,
    aten.equal.default: _equal,
}
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.as_strided.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
)
QuantizedTensor.handlers.update(_HANDLERS | dict.fromkeys(_VIEWS, _view))
