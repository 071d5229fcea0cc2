"""FP8 for PyTorch, right on whichever device the tensor lives."""

from quaver import nn, ops, recipe
from quaver.conversion import convert, convert_back, status
from quaver.devices import get_module_device, is_fp8_available
from quaver.errors import (
    CheckpointError,
    DeviceMismatchError,
    QuaverError,
    RecipeError,
    SimulatorUnavailableError,
)
from quaver.nn import Linear, quantized_model_init
from quaver.quantizers import Float8Quantizer
from quaver.scaling import RecipeState, autocast
from quaver.tensors import Float8Tensor

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DeviceMismatchError",
    "Float8Quantizer",
    "Float8Tensor",
    "Linear",
    "QuaverError",
    "RecipeError",
    "RecipeState",
    "SimulatorUnavailableError",
    "autocast",
    "convert",
    "convert_back",
    "get_module_device",
    "is_fp8_available",
    "nn",
    "ops",
    "quantized_model_init",
    "recipe",
    "status",
]
