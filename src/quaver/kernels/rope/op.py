"""The operator `rope`."""

import torch

from quaver.kernels.door import Kernel
from quaver.kernels.library import define
from quaver.kernels.rope import reference


def _fake(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    transposed: bool = False,
) -> torch.Tensor:
    reference.check_rope(x, cos, sin, positions)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


rope = define(
    Kernel(reference.rope, triton="quaver.kernels.rope.triton"),
    "(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved, "
    "bool transposed=False) -> Tensor",
    _fake,
)
