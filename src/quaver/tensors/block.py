"""What the tensors with a scale for each block of values share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from quaver.formats import NAMES
from quaver.kernels.scaled_mm.layouts import BLOCK_2D, NVFP4_2D
from quaver.tensors.base import QuantizedTensor, Shard
from quaver.tensors.payload import Operand

aten = torch.ops.aten

_TURNS = {aten.t.default: (), aten.transpose.int: (0, 1), aten.permute.default: ((1, 0),)}


class BlockTensor(QuantizedTensor):
    """A tensor [..., K] whose rows [M, K], and columns, are quantized in blocks.

    Views that keep whole rows (other leading dimensions, one dimension for all, rows taken out) and
    the transpose share its payload; with two-dimensional blocks, rows are taken out in whole
    blocks.
    """

    side: ClassVar[int]
    values_per_byte: ClassVar[int] = 1

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The payload's dtype; uint8 where two values are in a byte."""
        return next(iter(self.parts().values())).dtype

    @property
    def format(self) -> str:
        """The payload's format."""
        return NAMES[self.fp8_dtype]

    @property
    def two_dimensional(self) -> bool:
        """Whether a block spreads over rows, too."""
        return self.payload_layout in (BLOCK_2D, NVFP4_2D)

    def viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view that keeps whole rows, or the transpose.

        Raises:
            NotImplementedError: another one.
        """
        like = torch.empty(self.shape, device="meta")
        shapes = func(like, *args, **kwargs)
        if func in _TURNS:
            if self.dim() == 2:
                same = shapes.shape == self.shape and shapes.stride() == like.stride()
                return self._whole(self.shape) if same else self._transposed()
        elif isinstance(shapes, torch.Tensor):
            view = self._rows_of(shapes)
            if view is not None:
                return view
        else:
            views = [self._rows_of(shape) for shape in shapes]
            if None not in views:
                return views
        raise NotImplementedError(
            f"{func} does not keep whole rows and whole blocks of this {type(self).__name__} of "
            f"shape {tuple(self.shape)}; call it on `.dequantize()`"
        )

    def _rows_of(self, view: torch.Tensor) -> QuantizedTensor | None:
        """The tensor of the rows that a view like `view` has; None: no run of whole rows."""
        rows, width = self.rows_and_width()
        flat = view.dim() == 1 and view.numel() == rows * width
        if not view.is_contiguous() or not (flat or view.shape[-1:] == (width,)):
            return None
        if flat:
            return self.like(self.parts(), shape=view.shape, matrix=(rows, width))
        start, beside = divmod(int(view.storage_offset()), max(width, 1))
        stop = start + math.prod(view.shape[:-1])
        if (start, beside, stop) == (0, 0, rows):
            return self._whole(view.shape)
        return None if beside else self._run(start, stop, view.shape)

    def _whole(self, shape: torch.Size) -> QuantizedTensor:
        """Other leading dimensions: a view that can be written to, since it is all of it."""
        return self.like(self.parts(), shape=shape, matrix=None)

    def _run(self, start: int, stop: int, shape: torch.Size) -> QuantizedTensor | None:
        """The rows from start to stop, with the copies whose blocks they do not cut."""
        rows, _ = self.rows_and_width()
        whole_blocks = start % self.side == 0 and (stop % self.side == 0 or stop == rows)
        row, col = self.operands()
        parts: dict[str, torch.Tensor] = {}
        height = self.side if self.two_dimensional else 1
        if row is not None and row.scale_inv is not None and (whole_blocks or height == 1):
            taken = slice(start // height, -(-stop // height))
            parts |= self._named("rowwise", row, row.data[start:stop], row.scale_inv[taken])
        if col is not None and col.scale_inv is not None and whole_blocks:
            end = None if stop == rows else stop // self.values_per_byte
            data = col.data[:, start // self.values_per_byte : end]
            scales = col.scale_inv[:, start // self.side : -(-stop // self.side)]
            parts |= self._named("columnwise", col, data, scales)
        return self.like(parts, shape=shape, matrix=None, is_view=True) if parts else None

    def _transposed(self) -> QuantizedTensor:
        """The transpose: the row-wise copy is its column-wise one, and the other way round.

        Of two copies only that whose values count is kept.
        """
        row, col = self.operands()
        if row is not None:
            parts = self._named("columnwise", row, row.data, row.scale_inv)
        elif col is not None and not self.hadamard:
            parts = self._named("rowwise", col, col.data, col.scale_inv)
        else:
            raise NotImplementedError(
                f"this {type(self).__name__} has no row-wise copy to transpose; make it with "
                "rowwise=True, or call it on `.dequantize()`"
            )
        return self.like(parts, shape=self.shape[::-1], hadamard=False, is_view=True)

    def _named(
        self, usage: str, operand: Operand, data: torch.Tensor, scale_inv: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        top = operand.global_scale_inv
        named = {"data": data, "scale_inv": scale_inv, "global_scale_inv": top}
        return {f"{usage}_{name}": part for name, part in named.items() if part is not None}

    def shard_parts(self, group: Any) -> Shard:
        """Rows, and their scales: nothing is shared by all shards.

        Raises:
            NotImplementedError: there are global scales, too.
        """
        row = self.quantized(columnwise=False).rowwise
        if row is None or row.scale_inv is None or row.global_scale_inv is not None:
            return super().shard_parts(group)
        return {}, {"rowwise_data": row.data, "rowwise_scale_inv": row.scale_inv}

    def scale_text(self) -> str:
        """The layout and the scales' shape and dtype, for `repr`; no value is read."""
        operand = next(operand for operand in self.operands() if operand is not None)
        scale_inv = operand.scale_inv
        scales = "None" if scale_inv is None else f"{tuple(scale_inv.shape)} {scale_inv.dtype}"
        return f"layout={self.payload_layout}, scale_inv={scales}"
