"""FP8 and FP4 for PyTorch, right on whichever device the tensor lives."""

import importlib
from typing import Any

from quaver import nn, ops, optim, recipe
from quaver.conversion import Rule, convert, convert_back, status
from quaver.devices import get_module_device, is_fp8_available
from quaver.errors import (
    CheckpointError,
    DeviceMismatchError,
    QuaverError,
    RecipeError,
    SimulatorUnavailableError,
)
from quaver.nn import Linear, quantized_model_init
from quaver.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from quaver.scaling import RecipeState, autocast
from quaver.tensors import Float8BlockwiseTensor, Float8Tensor, MXFP8Tensor, NVFP4Tensor

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `quaver.testing` brings the simulator along, which programs that do not test can do without.
    if name == "testing":
        return importlib.import_module("quaver.testing")
    raise AttributeError(f"module 'quaver' has no attribute {name!r}")


__all__ = [
    "CheckpointError",
    "DeviceMismatchError",
    "Float8BlockQuantizer",
    "Float8BlockwiseTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "IdentityQuantizer",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuaverError",
    "RecipeError",
    "RecipeState",
    "Rule",
    "SimulatorUnavailableError",
    "autocast",
    "convert",
    "convert_back",
    "get_module_device",
    "is_fp8_available",
    "nn",
    "ops",
    "optim",
    "quantized_model_init",
    "recipe",
    "status",
]
