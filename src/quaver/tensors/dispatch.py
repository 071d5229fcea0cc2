"""How a torch operation on quantized tensors is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

DEQUANTIZED = frozenset(
    "mm addmm bmm baddbmm matmul linear add sub mul div neg abs sum mean var std norm "
    "linalg_vector_norm amax amin max min isnan isfinite isinf eq ne lt le gt ge where pow sqrt "
    "zeros_like ones_like full_like rand_like randn_like new_empty new_ones new_full "
    "embedding cat stack addcmul addcdiv lerp nan_to_num all any allclose isclose dot mv "
    "index index_select masked_select gather take".split()
)
"""Operations that read a quantized tensor as an ordinary operand, by their aten names.

Indexing with tensors or masks is among them: its result is a plain copy. Slices and `w[0]`, which
are views, are not: they stay quantized, or are refused.
"""


def dispatch(base: Any, cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out `func` for tensors of `cls`, a subclass of `base`.

    Raises:
        NotImplementedError: an operation that is defined in none of the ways.
    """
    handler = base.handlers.get(func)
    if handler is not None:
        return handler(func, *args, **kwargs)
    written = [x for x in _written(func, args, kwargs) if isinstance(x, base)]
    if not written and func._schema.name.removeprefix("aten::") not in DEQUANTIZED:
        raise NotImplementedError(
            f"{func} is not defined for a {cls.__name__}; call it on `.dequantize()`"
        )
    for target in written:
        target.refuse_write_to_view()
    values: dict[int, Any] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, base):
            return x
        return values.setdefault(id(x), x.dequantize())

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    for target in written:
        target.assign(values[id(target)])
    back = {id(values[id(target)]): target for target in written}
    return tree_map(lambda x: back.get(id(x), x), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that `func` writes to, those in lists one by one."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[i] if i < len(args) else None)
            yield from tree_leaves(given)
