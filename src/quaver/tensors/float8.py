"""A tensor whose values are FP8 with one scale: what parameters and users hold.

Inside Quaver plain payloads travel; this subclass lives at the boundaries only.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from quaver.formats import NAMES
from quaver.kernels import cast, dequantize
from quaver.kernels.scaled_mm.layouts import TENSOR
from quaver.tensors.base import QuantizedTensor, Shard
from quaver.tensors.frame import Frame
from quaver.tensors.payload import Operand, Payload, Quantized


class Float8Tensor(QuantizedTensor):
    """x ≈ data * scale_inv, with the shape, device and (nominal) dtype of x.

    Attributes:
        rowwise_data: [..., K] in torch.float8_e4m3fn or torch.float8_e5m2, or None.
        columnwise_data: the same values transposed, [K, M], M the product of the leading
            dimensions, or None.
        rowwise_scale_inv: float32 [1]; multiplies the payload. One scale serves both.
        fp8_dtype: the payload's dtype.
        quantizer: what made it, and re-quantizes it after an in-place change; or None, and then
            the scale is that of the tensor's own amax.

    `quaver.tensors.base` says what torch's operations do with it.
    """

    layouts: ClassVar[tuple[str, ...]] = (TENSOR,)
    part_names: ClassVar[tuple[str, ...]] = (
        "rowwise_data",
        "columnwise_data",
        "rowwise_scale_inv",
    )
    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Float8Tensor],
        rowwise_data: torch.Tensor | Float8Tensor | Quantized | None,
        rowwise_scale_inv: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        /,
        *,
        dtype: torch.dtype | None = None,
        shape: torch.Size | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> Any:
        """Wrap a payload, or operands; or, as `type(param)(tensor, ...)`, another Float8Tensor."""
        if isinstance(rowwise_data, Float8Tensor):
            return super().__new__(cls, rowwise_data, requires_grad=requires_grad)
        if attributes:
            raise TypeError(f"a Float8Tensor takes no arguments named {', '.join(attributes)}")
        if isinstance(rowwise_data, Quantized):
            cls.check_quantized(rowwise_data)
            parts = cls.parts_of(rowwise_data)
        else:
            given = (rowwise_data, columnwise_data, rowwise_scale_inv)
            named = zip(cls.part_names, given, strict=True)
            parts = {name: part for name, part in named if part is not None}
        if len(parts) < 2 or "rowwise_scale_inv" not in parts:
            raise ValueError("a Float8Tensor needs a payload and its rowwise_scale_inv")
        row, col = parts.get("rowwise_data"), parts.get("columnwise_data")
        if shape is None:
            shape = row.shape if row is not None else col.shape[::-1]  # type: ignore[union-attr]
        if row is not None:
            parts["rowwise_data"] = row.view(shape)
        frame = Frame(torch.Size(shape), dtype or torch.float32, TENSOR, quantizer)
        return cls.build(parts, frame, requires_grad)

    @classmethod
    def parts_of(cls, quantized: Quantized) -> dict[str, torch.Tensor]:
        """The two payloads, and the one scale."""
        parts = super().parts_of(quantized)
        transposed_scale = parts.pop("columnwise_scale_inv", None)
        if transposed_scale is not None:
            parts.setdefault("rowwise_scale_inv", transposed_scale)
        return parts

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The payload's dtype."""
        return self._any_data().dtype

    @property
    def format(self) -> str:
        """The payload's format: E4M3 or E5M2."""
        return NAMES[self.fp8_dtype]

    @property
    def columnwise_scale_inv(self) -> torch.Tensor | None:
        """The scale of the column-wise copy, which is the row-wise one; None without a copy."""
        return self.rowwise_scale_inv if self.columnwise_data is not None else None

    def _any_data(self) -> torch.Tensor:
        return next(iter(self.parts().values()))

    def payload(self) -> Payload:
        """The row-wise payload as plain tensors; made from the column-wise one if need be."""
        data = self.rowwise_data
        if data is None:
            data = self._any_data().t().contiguous().view(self.shape)
        return Payload(data, self.rowwise_scale_inv)

    def operands(self) -> Quantized:
        """The operands that it holds, [M, K] and [K, M]."""
        row, col = self.rowwise_data, self.columnwise_data
        scale_inv = self.rowwise_scale_inv
        return Quantized(
            None if row is None else Operand(row.reshape(self.rows_and_width()), scale_inv, TENSOR),
            None if col is None else Operand(col, scale_inv, TENSOR),
        )

    def values_of(self, operand: Operand, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operand stands for."""
        values: torch.Tensor = dequantize(operand.data, operand.scale_inv, dtype)
        return values

    def turned(self, operand: Operand, width: int) -> Operand:
        """The operand of the transpose: one scale serves both."""
        return operand._replace(data=operand.data.t())

    def cast_alone(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize with the scale of the rows' own amax."""
        unset = torch.zeros(1, dtype=torch.float32, device=rows.device)
        data, transposed, scale_inv = cast(rows, unset, None, unset, 0, self.fp8_dtype, columnwise)
        return Quantized(
            Operand(data, scale_inv, TENSOR) if rowwise else None,
            Operand(transposed, scale_inv, TENSOR) if columnwise else None,
        )

    def viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One scale serves all values, so every view of the row-wise payload is one of it."""
        data, scale_inv = self.payload()
        views = func(data, *args, **kwargs)
        if isinstance(views, torch.Tensor):
            return self._view(views, scale_inv)
        return [self._view(view, scale_inv) for view in views]

    def _view(self, data: torch.Tensor, scale_inv: torch.Tensor) -> Float8Tensor:
        """A view; it can be written to if it is all of the tensor, in every copy."""
        parts = {"rowwise_data": data, "rowwise_scale_inv": scale_inv}
        column = self.columnwise_data
        whole = data.numel() == math.prod(self.shape)
        rows = data.shape[-1:] == self.shape[-1:] and data.is_contiguous()
        if column is not None and whole and rows:
            parts["columnwise_data"] = column
        copies = self.rowwise_data is not None and len(parts) == len(self.parts())
        if whole and copies and not self.is_payload_view:
            return self.like(parts, shape=data.shape)
        return self.like(parts, shape=data.shape, quantizer=None, is_view=True)

    def shard_parts(self, group: Any) -> Shard:
        """The payload under the largest scale_inv of all shards, which they share.

        Shards that were updated on their own have scales of their own; then this rounds once more.
        """
        data, scale_inv = self.payload()
        common = scale_inv.detach().clone()
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
        values = dequantize(data, scale_inv, torch.float32)
        same, _, _ = cast(values, common.reciprocal(), None, None, 0, data.dtype, False)
        return {"rowwise_scale_inv": common}, {"rowwise_data": same}

    def scale_text(self) -> str:
        """The scale, for `repr`."""
        return f"scale_inv={self.rowwise_scale_inv!r}"
