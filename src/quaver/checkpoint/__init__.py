"""Checkpoints: FP8 formats of transformers in and out, quantized models in safetensors files."""

from quaver.checkpoint.calibration import calibrate_checkpoint
from quaver.checkpoint.convert import CheckpointReport, convert_checkpoint
from quaver.checkpoint.flat import flatten_state, unflatten_state
from quaver.checkpoint.loading import LoadReport, load_quantized
from quaver.checkpoint.plan import DEFAULT_EXCLUDE
from quaver.checkpoint.saving import load_model, save_model
from quaver.checkpoint.targets import FORMATS
from quaver.checkpoint.te_state import load_te_checkpoint

__all__ = [
    "DEFAULT_EXCLUDE",
    "FORMATS",
    "CheckpointReport",
    "LoadReport",
    "calibrate_checkpoint",
    "convert_checkpoint",
    "flatten_state",
    "load_model",
    "load_quantized",
    "load_te_checkpoint",
    "save_model",
    "unflatten_state",
]
