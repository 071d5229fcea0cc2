"""The operator `scale_update`, and the update with functions of the user's beside it."""

from typing import Any

import torch

from quaver.kernels.door import Kernel, launch
from quaver.kernels.library import define
from quaver.kernels.scale_update import reference

_SCHEMA = (
    "(Tensor(a!)[] histories, Tensor(b!)[] scales, Tensor(c!)[] readies, Tensor? amaxes, "
    "float limit, str algorithm) -> ()"
)


def _fake(*args: Any) -> None:
    return None


scale_update = define(
    Kernel(reference.scale_update, triton="quaver.kernels.scale_update.triton"), _SCHEMA, _fake
)

_custom = Kernel(reference.custom_scale_update)


def custom_scale_update(*args: Any) -> None:
    """`reference.custom_scale_update`; functions cannot be operator arguments, so it is traced."""
    if torch.compiler.is_compiling():
        reference.custom_scale_update(*args)
    else:
        launch(_custom, *args)
