"""What all quantized tensor classes share: how torch operations treat them.

- operations that a class has a handler for keep the tensor quantized;
- in-place operations dequantize, compute and re-quantize;
- those in `DEQUANTIZED` read it as the plain tensor that `.dequantize()` gives;
- everything else raises, and names `.dequantize()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

DEQUANTIZED = frozenset(
    "mm addmm bmm baddbmm matmul linear add sub mul div neg abs sum mean var std norm "
    "linalg_vector_norm amax amin max min isnan isfinite isinf eq ne lt le gt ge where pow sqrt "
    "zeros_like ones_like full_like rand_like randn_like new_zeros new_empty new_ones new_full "
    "embedding cat stack addcmul addcdiv lerp nan_to_num all any allclose isclose dot mv".split()
)
"""Operations that read a quantized tensor as an ordinary operand, by their aten names."""


class QuantizedTensor(torch.Tensor):
    """Base of the quantized tensor classes: a wrapper with a shape, a device, a nominal dtype."""

    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def assign(self, value: torch.Tensor) -> None:
        """Quantize `value` into this tensor, in place."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out `func`.

        Raises:
            NotImplementedError: an operation that is defined in none of the three ways.
        """
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if _writes_first(func):
            target = args[0]
            value = func(*plain(args), **plain(kwargs))
            if isinstance(target, QuantizedTensor):
                target.assign(value)
            return target
        if func._schema.name.removeprefix("aten::") in DEQUANTIZED:
            return func(*plain(args), **plain(kwargs))
        raise NotImplementedError(
            f"{func} is not defined for a {cls.__name__}; call it on `.dequantize()`"
        )


def plain(tree: Any) -> Any:
    """`tree` with every quantized tensor in it dequantized."""
    return tree_map(lambda x: x.dequantize() if isinstance(x, QuantizedTensor) else x, tree)


def _writes_first(func: Any) -> bool:
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and bool(alias.is_write)
