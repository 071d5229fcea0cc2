"""The kernels as `torch.ops.quaver` operators, which is how torch.compile sees them.

Eager code calls the door directly: an operator's dispatch costs several microseconds a call.
"""

from collections.abc import Callable
from typing import Any

import torch

from quaver.kernels.door import Kernel, launch

_is_compiling = torch.compiler.is_compiling
_library = torch.library.Library("quaver", "DEF")


def define(kernel: Kernel, schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `kernel` as an operator and return the function that Quaver's code calls.

    Args:
        schema: the operator's arguments and results in torch's schema language.
        fake: shapes and dtypes of the results, from the arguments.
    """
    _library.define(f"{kernel.name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))

    def implementation(*args: Any) -> Any:
        return launch(kernel, *args)

    _library.impl(kernel.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{kernel.name}", fake, lib=_library)
    operator = getattr(torch.ops.quaver, kernel.name).default

    def call(*args: Any) -> Any:
        if _is_compiling():
            return operator(*args)
        return launch(kernel, *args)

    call.__name__ = kernel.name
    call.__doc__ = kernel.reference.__doc__
    return call
