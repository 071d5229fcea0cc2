"""What a quantized tensor is beside its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Frame(NamedTuple):
    """What a quantized tensor is beside its parts.

    Attributes:
        shape, dtype: of the values that it stands for.
        layout: a name from `quaver.kernels.scaled_mm.layouts`.
        quantizer: what re-quantizes it, or None.
        hadamard: whether the column-wise copy is of transformed values.
        matrix: rows and columns of the payload where a view to one dimension hides them, else None.
        is_view: whether the parts are pieces of another tensor's.
    """

    shape: torch.Size
    dtype: torch.dtype
    layout: str
    quantizer: Any = None
    hadamard: bool = False
    matrix: tuple[int, int] | None = None
    is_view: bool = False


class Same:
    """A value that is equal to itself only, and is not copied.

    torch.compile copies what it remembers of a tensor, and compares it with what it meets; a copy
    of a quantizer would differ from it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Same:
        return self
