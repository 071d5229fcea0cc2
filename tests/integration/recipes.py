"""Every recipe by name, for tests that must hold for all of them."""

from typing import Any

import torch

import quaver as qv
from quaver.formats import E4M3, E5M2
from quaver.quantizers import Quantizer
from quaver.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)


def mixed(role: Role) -> Quantizer | None:
    """Formats by role, and for weights by the module's name; `*fc2`'s weight stays as it is."""
    if role.tensor == "input":
        return qv.Float8CurrentScalingQuantizer(E4M3)
    if role.tensor == "grad_output":
        return qv.Float8BlockQuantizer(E5M2, block_scaling_dim=1)
    if role.module_name.endswith("fc2"):
        return None
    if "32" in role.module_name:
        return qv.MXFP8Quantizer(E4M3)
    return qv.Float8BlockQuantizer(E4M3)


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "custom": CustomRecipe(mixed),
}
STATELESS = [name for name in RECIPES if name != "delayed"]

TENSORS = {
    "delayed": qv.Float8Tensor,
    "current": qv.Float8Tensor,
    "block": qv.Float8BlockwiseTensor,
    "mxfp8": qv.MXFP8Tensor,
    "nvfp4": qv.NVFP4Tensor,
    "custom": qv.Float8BlockwiseTensor,
}
"""The class of a quantized weight; custom's where its name has no 32."""

BOUNDS = {"delayed": 0.04, "current": 0.04, "block": 0.04, "mxfp8": 0.05, "nvfp4": 0.2}
BOUNDS |= {"custom": 0.05}
"""The most that the forward of normal values may be off, in the norm."""


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error in the norm."""
    value, exact = value.detach().cpu().double(), exact.detach().cpu().double()
    return ((value - exact).norm() / exact.norm()).item()


def parts(tensor: Any) -> dict[str, torch.Tensor]:
    """The plain tensors that a quantized one is made of, by attribute."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}
