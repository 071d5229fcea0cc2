"""How an operand's data and scales belong together, by name, and what they stand for."""

from collections.abc import Callable
from typing import Final

import torch

from quaver.errors import QuaverError
from quaver.kernels.block_cast.reference import block_dequantize
from quaver.kernels.dequantize.reference import dequantize
from quaver.kernels.mx_cast.reference import mx_dequantize
from quaver.kernels.nvfp4_cast.reference import nvfp4_dequantize

TENSOR: Final = "tensor"
BLOCK_1D: Final = "block_1d"
BLOCK_2D: Final = "block_2d"
MX: Final = "mx"
NVFP4: Final = "nvfp4"
NVFP4_2D: Final = "nvfp4_2d"
PLAIN: Final = "plain"

Scale = torch.Tensor | None


def _nvfp4(data: torch.Tensor, scale: Scale, global_scale: Scale, two: bool) -> torch.Tensor:
    width = 2 * data.shape[1]  # an odd width comes back with a zero more
    return nvfp4_dequantize(data, _given(scale), _given(global_scale), two, width, torch.float32)


_VALUES: Final[dict[str, Callable[[torch.Tensor, Scale, Scale], torch.Tensor]]] = {
    PLAIN: lambda data, scale, _: data.to(torch.float32),
    TENSOR: lambda data, scale, _: dequantize(data, _given(scale), torch.float32),
    BLOCK_1D: lambda data, scale, _: block_dequantize(data, _given(scale), 1, torch.float32),
    BLOCK_2D: lambda data, scale, _: block_dequantize(data, _given(scale), 2, torch.float32),
    MX: lambda data, scale, _: mx_dequantize(data, _given(scale), torch.float32),
    NVFP4: lambda data, scale, top: _nvfp4(data, scale, top, False),
    NVFP4_2D: lambda data, scale, top: _nvfp4(data, scale, top, True),
}


def operand_values(
    data: torch.Tensor, scale_inv: Scale, layout: str, global_scale_inv: Scale = None
) -> torch.Tensor:
    """What an operand stands for, in float32, [rows, summed dimension].

    Raises:
        QuaverError: an unknown layout, or one whose scales are missing.
    """
    if layout not in _VALUES:
        raise QuaverError(f"layout must be one of {', '.join(_VALUES)}, not {layout!r}")
    return _VALUES[layout](data, scale_inv, global_scale_inv)


def _given(scale: Scale) -> torch.Tensor:
    if scale is None:
        raise QuaverError("this layout needs its scales")
    return scale
