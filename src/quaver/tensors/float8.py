"""A tensor whose values are FP8 with one scale: what parameters and users hold.

Inside Quaver plain payloads travel; this subclass lives at the boundaries only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from typing import cast as cast_type

import torch
from torch import nn

from quaver.formats import NAMES
from quaver.kernels import cast, dequantize
from quaver.tensors.base import QuantizedTensor
from quaver.tensors.payload import Payload


class Float8Tensor(QuantizedTensor):
    """x ≈ data * scale_inv, with the shape, device and (nominal) dtype of x.

    Attributes:
        rowwise_data: [..., K] in torch.float8_e4m3fn or torch.float8_e5m2, or None.
        columnwise_data: the same values transposed, [K, M], M the product of the leading
            dimensions, or None.
        rowwise_scale_inv: float32 [1]; multiplies the payload. One scale serves both.
        fp8_dtype: the payload's dtype.
        quantizer: what made it, and re-quantizes it after an in-place change; or None.

    `quaver.tensors.base` says what torch's operations do with it.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor
    quantizer: Any
    is_payload_view: bool
    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @staticmethod
    def __new__(
        cls: type[Float8Tensor],
        rowwise_data: torch.Tensor | Float8Tensor | None,
        rowwise_scale_inv: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        shape: torch.Size | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        """Wrap a payload; or, as `type(param)(tensor, requires_grad=...)`, another Float8Tensor."""
        if isinstance(rowwise_data, Float8Tensor):
            return wrap_like(rowwise_data, requires_grad=requires_grad)
        source = rowwise_data if rowwise_data is not None else columnwise_data
        if source is None or rowwise_scale_inv is None:
            raise ValueError("a Float8Tensor needs a payload and its rowwise_scale_inv")
        if shape is None:
            shape = source.shape if rowwise_data is not None else source.shape[::-1]
        self: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype or torch.float32,
            device=source.device,
            requires_grad=requires_grad,
        )
        self.rowwise_data = rowwise_data
        self.columnwise_data = columnwise_data
        self.rowwise_scale_inv = rowwise_scale_inv
        self.quantizer = quantizer
        self.is_payload_view = False
        return self

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The payload's dtype."""
        return self._any_data().dtype

    @property
    def columnwise_scale_inv(self) -> torch.Tensor | None:
        """The scale of the column-wise copy, which is the row-wise one; None without a copy."""
        return self.rowwise_scale_inv if self.columnwise_data is not None else None

    def _any_data(self) -> torch.Tensor:
        data = self.rowwise_data if self.rowwise_data is not None else self.columnwise_data
        if data is None:
            raise ValueError("this Float8Tensor has lost its payload")
        return data

    def payload(self) -> Payload:
        """The row-wise payload as plain tensors; made from the column-wise one if need be."""
        data = self.rowwise_data
        if data is None:
            data = self._any_data().t().contiguous().view(self.shape)
        return Payload(data, self.rowwise_scale_inv)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (default: the nominal dtype), on its device."""
        data, scale_inv = self.payload()
        plain: torch.Tensor = dequantize(data, scale_inv, dtype or self.dtype)
        return plain

    def float(self) -> torch.Tensor:
        """The values in float32, dequantized."""
        return self.dequantize(torch.float32)

    def data_ptr(self) -> int:
        """The payload's address: a wrapper has none, and tools tell tied tensors by it."""
        return self._any_data().data_ptr()

    def assign(self, value: torch.Tensor) -> None:
        """Quantize `value` into this tensor in place: with its quantizer, else its own amax.

        Raises:
            NotImplementedError: this is a view, whose scale is the whole tensor's.
        """
        self.refuse_write_to_view()
        if self.quantizer is not None:
            fresh = self.quantizer(value.to(self.dtype))
            parts = (fresh.rowwise_data, fresh.columnwise_data, fresh.rowwise_scale_inv)
        else:
            unset = torch.zeros(1, dtype=torch.float32, device=value.device)
            columnwise = self.columnwise_data is not None
            data, transposed, scale_inv = cast(
                value, unset, None, unset, 0, self.fp8_dtype, columnwise
            )
            parts = (data, transposed, scale_inv)
        names = ("rowwise_data", "columnwise_data", "rowwise_scale_inv")
        for name, part in zip(names, parts, strict=True):
            mine = getattr(self, name)
            if mine is not None:
                mine.copy_(part)

    def refuse_write_to_view(self) -> None:
        """Raise if this is a view: a new scale for it would change the values around it."""
        if self.is_payload_view:
            raise NotImplementedError(
                "a view of a Float8Tensor cannot be written to; write to the whole tensor, or to "
                "what `.dequantize()` gives"
            )

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value before quantization, on the CPU, if its making was asked to preserve it."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Forget the value before quantization."""
        if hasattr(self, "_high_precision_init_val"):
            del self._high_precision_init_val

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8Tensor({NAMES[self.fp8_dtype]}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"scale_inv={self.rowwise_scale_inv!r}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["rowwise_data", "columnwise_data", "rowwise_scale_inv"]
        present = [n for n in names if getattr(self, n) is not None]
        return present, (self.dtype, self.shape, self.quantizer)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> Float8Tensor:
        dtype, shape, quantizer = meta
        return rebuild(
            inner.get("rowwise_data"),
            inner["rowwise_scale_inv"],
            inner.get("columnwise_data"),
            dtype,
            shape,
            quantizer,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        if id(self) in memo:
            twin: Float8Tensor = memo[id(self)]
            return twin
        twin = map_payload(self, torch.clone)
        if isinstance(self, nn.Parameter):
            twin = cast_type(Float8Tensor, nn.Parameter(twin))
        twin.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():  # a preserved initial value, a user's attribute
            twin.__dict__.setdefault(name, value)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        rowwise, columnwise = (  # as bytes: pickle itself does not know FP8 storages
            None if data is None else data.view(torch.uint8)
            for data in (self.rowwise_data, self.columnwise_data)
        )
        args = (
            (rowwise, columnwise, self.fp8_dtype),
            self.rowwise_scale_inv,
            self.dtype,
            self.shape,
            self.requires_grad,
            isinstance(self, nn.Parameter),
        )
        return restore, args


def rebuild(
    rowwise_data: torch.Tensor | None,
    scale_inv: torch.Tensor,
    columnwise_data: torch.Tensor | None,
    dtype: torch.dtype,
    shape: torch.Size,
    quantizer: Any,
) -> Float8Tensor:
    """A Float8Tensor from its parts."""
    return Float8Tensor(
        rowwise_data, scale_inv, columnwise_data, dtype=dtype, shape=shape, quantizer=quantizer
    )


def restore(
    payload: tuple[torch.Tensor | None, torch.Tensor | None, torch.dtype],
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    shape: torch.Size,
    requires_grad: bool,
    is_parameter: bool,
) -> Float8Tensor:
    """A Float8Tensor from what pickling wrote; a quantizer belongs to a module, not to a file."""
    rowwise, columnwise = (None if x is None else x.view(payload[2]) for x in payload[:2])
    tensor = rebuild(rowwise, scale_inv, columnwise, dtype, shape, None)
    if is_parameter:
        return cast_type(Float8Tensor, nn.Parameter(tensor, requires_grad=requires_grad))
    tensor.requires_grad_(requires_grad)
    return tensor


def map_payload(tensor: Float8Tensor, function: Any, dtype: Any = None) -> Float8Tensor:
    """`tensor` with `function` applied to its payload and scale; nominal dtype `dtype`."""
    rowwise, columnwise = (
        None if part is None else function(part)
        for part in (tensor.rowwise_data, tensor.columnwise_data)
    )
    scale_inv = function(tensor.rowwise_scale_inv)
    nominal = dtype or tensor.dtype
    return rebuild(rowwise, scale_inv, columnwise, nominal, tensor.shape, tensor.quantizer)


def wrap_like(tensor: Float8Tensor, requires_grad: bool = False) -> Float8Tensor:
    """Another wrapper around the same payload."""
    twin = map_payload(tensor, lambda part: part)
    twin.requires_grad_(requires_grad)
    return twin


torch.serialization.add_safe_globals([Float8Tensor, restore])
