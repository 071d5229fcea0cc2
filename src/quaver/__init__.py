"""FP8 and FP4 for PyTorch, right on whichever device the tensor lives."""

import importlib
from typing import Any

from quaver import checkpoint, nn, ops, optim, recipe
from quaver.conversion import Rule, convert, convert_back, status
from quaver.devices import get_module_device, is_fp8_available
from quaver.errors import (
    CheckpointError,
    DeviceMismatchError,
    QuaverError,
    RecipeError,
    SimulatorUnavailableError,
)
from quaver.functional import (
    apply_rotary_pos_emb,
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_unpermute,
    parallel_cross_entropy,
)
from quaver.nn import (
    AttentionOptions,
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    LayerOptions,
    Linear,
    MultiheadAttention,
    QKNorm,
    RMSNorm,
    RNGStatesTracker,
    RotaryPositionEmbedding,
    TransformerLayer,
    WgradOptions,
    quantized_model_init,
)
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

CudaRNGStatesTracker = RNGStatesTracker
"""The name that users of TransformerEngine know."""


def __getattr__(name: str) -> Any:
    # `quaver.testing` brings the simulator along, which programs that do not test can do without,
    # and the integrations the libraries that they are for.
    if name in ("integrations", "testing"):
        return importlib.import_module(f"quaver.{name}")
    if name == "QuaverConfig":
        return importlib.import_module("quaver.integrations.transformers").QuaverConfig
    raise AttributeError(f"module 'quaver' has no attribute {name!r}")


__all__ = [
    "AttentionOptions",
    "CheckpointError",
    "CudaRNGStatesTracker",
    "DeviceMismatchError",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "IdentityQuantizer",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerOptions",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QKNorm",
    "QuaverError",
    "RMSNorm",
    "RNGStatesTracker",
    "RecipeError",
    "RecipeState",
    "RotaryPositionEmbedding",
    "Rule",
    "SimulatorUnavailableError",
    "TransformerLayer",
    "WgradOptions",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "convert",
    "convert_back",
    "get_module_device",
    "is_fp8_available",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_unpermute",
    "nn",
    "ops",
    "optim",
    "parallel_cross_entropy",
    "quantized_model_init",
    "recipe",
    "status",
]
