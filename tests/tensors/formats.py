"""A tensor of every format to test with."""

import torch

import quaver as qv
from quaver.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from tests.samples import normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

QUANTIZERS = {
    "float8": lambda **usage: Float8CurrentScalingQuantizer(E4M3, **usage),
    "block_1d": lambda **usage: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usage),
    "block_2d": lambda **usage: Float8BlockQuantizer(E5M2, power_2_scale=False, **usage),
    "mx": lambda **usage: MXFP8Quantizer(E4M3, **usage),
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda **usage: NVFP4Quantizer(two_dimensional=True, **usage),
    "nvfp4_rht": lambda **usage: NVFP4Quantizer(hadamard=True, **usage),
}
BLOCKS = [name for name in QUANTIZERS if name != "float8"]
LOSSLESS = ("float8", "block_2d", "nvfp4_2d")
"""Whose two copies stand for the same values."""


def make(name: str, *shape: int, device="cpu", dtype=torch.float32, **usage):
    return QUANTIZERS[name](**usage)(normal(*shape, dtype=dtype, device=device, name="formats"))


def part_bytes(t) -> dict[str, torch.Tensor]:
    parts = t.detach().parts().items()
    return {name: part.cpu().contiguous().view(torch.uint8) for name, part in parts}


def same_parts(left, right) -> bool:
    """Equal bytes in all parts, and the same parts."""
    a, b = part_bytes(left), part_bytes(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def is_kind(t, like) -> bool:
    return type(t) is type(like) and isinstance(t, qv.tensors.QuantizedTensor)
