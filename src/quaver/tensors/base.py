"""What all quantized tensor classes share: their making, values, writing and torch operations.

`quaver.tensors.operations` says which torch operations keep a tensor quantized. Of the others,

- in-place operations and `out=` dequantize, compute and re-quantize;
- those in `DEQUANTIZED` read it as the plain tensor that `.dequantize()` gives;
- everything else raises, and names `.dequantize()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from quaver.tensors.dispatch import dispatch
from quaver.tensors.frame import Frame
from quaver.tensors.payload import Operand, Quantized
from quaver.tensors.wrapper import WrapperTensor

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

Handler = Callable[..., Any]
Shard = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class QuantizedTensor(WrapperTensor):
    """Base of the quantized tensor classes: a wrapper with a shape, a device, a nominal dtype.

    Attributes:
        rowwise_data, rowwise_scale_inv: payload and scales along the rows, or None.
        columnwise_data, columnwise_scale_inv: the same of the transpose, or None.
        payload_layout: how payload and scales belong together (`quaver.kernels.scaled_mm.layouts`).
        quantizer: what made it, and re-quantizes it after an in-place change; or None.
        is_payload_view: whether it is a view, which cannot be written to.

    `Class(other, requires_grad=...)` is a parameter of the parts of another tensor of the class, as
    those expect who rebuild a parameter by `type(parameter)(value, **parameter.__dict__)`.
    """

    layouts: ClassVar[tuple[str, ...]] = ()
    part_names: ClassVar[tuple[str, ...]] = (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
    )
    handlers: ClassVar[dict[Any, Handler]] = {}

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        quantized: Quantized | QuantizedTensor,
        *,
        shape: torch.Size | None = None,
        dtype: torch.dtype = torch.float32,
        quantizer: Any = None,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> Any:
        """Wrap operands [M, K] and [K, M] as a tensor of `shape` [..., K] and nominal `dtype`.

        Args:
            attributes: of a parameter that is rebuilt from another tensor; that one's own count.

        Raises:
            ValueError: no operand, or one of another format.
        """
        if isinstance(quantized, cls):
            return nn.Parameter(quantized.like(quantized.parts()), requires_grad=requires_grad)
        given = cls.check_quantized(quantized)
        if attributes:
            raise TypeError(f"a {cls.__name__} takes no arguments {', '.join(attributes)}")
        if shape is None:
            raise ValueError(f"a {cls.__name__} needs the shape of the values it stands for")
        layout = next(o.layout for o in given if o is not None)
        hadamard = bool(getattr(quantizer, "hadamard", False))
        frame = Frame(torch.Size(shape), dtype, layout, quantizer, hadamard)
        return cls.build(cls.parts_of(given), frame, requires_grad)

    # ---- what a class says of its format

    @classmethod
    def parts_of(cls, quantized: Quantized) -> dict[str, torch.Tensor]:
        """The tensors that the operands are made of, by the names of the attributes."""
        parts: dict[str, torch.Tensor] = {}
        for usage, operand in zip(("rowwise", "columnwise"), quantized, strict=True):
            if operand is not None:
                named = {
                    f"{usage}_data": operand.data,
                    f"{usage}_scale_inv": operand.scale_inv,
                    f"{usage}_global_scale_inv": operand.global_scale_inv,
                }
                parts |= {name: part for name, part in named.items() if part is not None}
        return parts

    def values_of(self, operand: Operand, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operand stands for, [rows, width]."""
        raise NotImplementedError

    def cast_alone(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize rows [M, K] where there is no quantizer to do it."""
        raise NotImplementedError

    def turned(self, operand: Operand, width: int) -> Operand | None:
        """The operand of the transpose, with the same values; None where there is none."""
        return None

    def viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The view that `func(self, ...)` gives, or an error that names `.dequantize()`."""
        raise NotImplementedError

    def shard_parts(self, group: Any) -> Shard:
        """As a shard of whole rows: parts that all shards share, and parts that are gathered.

        Raises:
            NotImplementedError: the format's shards cannot be put together.
        """
        raise NotImplementedError(
            f"shards of a {type(self).__name__} cannot be gathered: each has a scale of its own; "
            "shard high-precision weights, or `.dequantize()` first"
        )

    def scale_text(self) -> str:
        """The scales, for `repr`."""
        raise NotImplementedError

    @property
    def format(self) -> str:
        """The payload's format: E4M3, E5M2 or E2M1."""
        raise NotImplementedError

    @classmethod
    def check_quantized(cls, quantized: Any) -> Quantized:
        """`quantized`, if these are operands that the class can hold.

        Raises:
            ValueError: no operand, or one of another format.
        """
        name = cls.__name__
        operands = quantized if isinstance(quantized, Quantized) else Quantized(None, None)
        if operands.rowwise is None and operands.columnwise is None:
            raise ValueError(
                f"a {name} needs a Quantized with at least one operand, not "
                f"{type(quantized).__name__}; call a quantizer to make one"
            )
        found = {operand.layout for operand in operands if operand is not None}
        if len(found) > 1 or not found <= set(cls.layouts):
            raise ValueError(
                f"the operands of a {name} must have the layout {' or '.join(cls.layouts)}, "
                f"not {' and '.join(sorted(found))}"
            )
        return operands

    # ---- its values

    def rows_and_width(self) -> tuple[int, int]:
        """M, the product of the leading dimensions, and K, the last one."""
        return self.matrix or (math.prod(self.shape[:-1]), self.shape[-1])

    def operands(self) -> Quantized:
        """The operands that it holds."""
        found: list[Operand | None] = []
        for usage in ("rowwise", "columnwise"):
            data, scale_inv, top = (
                getattr(self, f"{usage}_{name}", None)
                for name in ("data", "scale_inv", "global_scale_inv")
            )
            found.append(
                None if data is None else Operand(data, scale_inv, self.payload_layout, top)
            )
        return Quantized(*found)

    def quantized(self, *, rowwise: bool = True, columnwise: bool = True) -> Quantized:
        """The operands for matrix products: row-wise [M, K], column-wise [K, M].

        One that it does not hold is made: from the other one without loss, where one scale serves
        both directions (a scale a tensor, blocks of two dimensions); else by quantizing anew, with
        its quantizer, the values that the other one stands for.

        Args:
            rowwise, columnwise: which operands are wanted; the others are None.
        """
        row, col = self.operands()
        rows, width = self.rows_and_width()
        if rowwise and row is None and col is not None:
            row = self.turned(col, rows) or self._anew(True, False).rowwise
        if columnwise and col is None and row is not None:
            col = self.turned(row, width) or self._anew(False, True).columnwise
        return Quantized(row if rowwise else None, col if columnwise else None)

    def _anew(self, rowwise: bool, columnwise: bool) -> Quantized:
        return self.quantize_rows(
            self.dequantize().reshape(self.rows_and_width()), rowwise, columnwise
        )

    def quantize_rows(self, rows: torch.Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        """Quantize rows [M, K] as this tensor is: with its quantizer if there is one."""
        cast = self.cast_alone if self.quantizer is None else self.quantizer.quantize
        with torch.no_grad():
            quantized: Quantized = cast(rows, rowwise, columnwise)
        return quantized

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (default: the nominal dtype), on its device.

        They come from the row-wise copy where there is one, else from the column-wise one.
        """
        row, col = self.operands()
        rows, width = self.rows_and_width()
        kind = dtype or self.dtype
        if row is not None:
            return self.values_of(row, width, kind).view(self.shape)
        if col is None:
            raise ValueError(f"this {type(self).__name__} has lost its payload")
        return self.values_of(col, rows, kind).t().contiguous().view(self.shape)

    def float(self) -> torch.Tensor:
        """The values in float32, dequantized."""
        return self.dequantize(torch.float32)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value before quantization, on the CPU, if its making was asked to preserve it."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Forget the value before quantization."""
        if hasattr(self, "_high_precision_init_val"):
            del self._high_precision_init_val

    # ---- writing

    def write(self, quantized: Quantized, non_blocking: bool = False) -> None:
        """Copy operands into the parts that it holds."""
        fresh = self.parts_of(quantized)
        for name, mine in self.parts().items():
            mine.copy_(fresh[name].reshape(mine.shape), non_blocking=non_blocking)

    def held(self) -> tuple[bool, bool]:
        """Whether it holds a row-wise copy, and a column-wise one."""
        row, col = self.operands()
        return row is not None, col is not None

    def assign(self, value: torch.Tensor) -> None:
        """Quantize `value` into this tensor in place: with its quantizer, else as its class does.

        Raises:
            NotImplementedError: this is a view, whose scales are the whole tensor's.
        """
        self.refuse_write_to_view()
        fit = value if value.dtype in _CASTABLE else value.to(self.dtype)
        rows = fit.reshape(self.rows_and_width())
        self.write(self.quantize_rows(rows, *self.held()))

    def same_format(self, other: QuantizedTensor) -> bool:
        """Whether `other` could take this tensor's bytes, and mean the same by them."""
        mine, theirs = (
            (
                (type(x), x.shape, x.rows_and_width(), x.payload_layout, x.hadamard),
                next(iter(x.parts().values())).dtype,
            )
            for x in (self, other)
        )
        return mine == theirs

    def refuse_write_to_view(self) -> None:
        """Raise if this is a view: new scales for it would change the values around it."""
        if self.is_payload_view:
            raise NotImplementedError(
                f"a view of a {type(self).__name__} cannot be written to; write to the whole "
                "tensor, or to what `.dequantize()` gives"
            )

    # ---- what Python and torch ask of it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out `func`.

        Raises:
            NotImplementedError: an operation that is defined in none of the ways.
        """
        return dispatch(QuantizedTensor, cls, func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{self.scale_text()}, device={self.device})"
        )
