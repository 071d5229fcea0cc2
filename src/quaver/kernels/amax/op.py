"""The operator `amax`."""

import torch

from quaver.kernels.amax import reference
from quaver.kernels.door import Kernel
from quaver.kernels.library import define


def _fake(x: torch.Tensor, into: torch.Tensor, slot: int) -> None:
    return None


amax = define(
    Kernel(reference.amax, triton="quaver.kernels.amax.triton"),
    "(Tensor x, Tensor(a!) into, int slot) -> ()",
    _fake,
)
