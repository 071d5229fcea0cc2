"""Modules."""

from quaver.nn.attention import (
    AttentionOptions,
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    QKNorm,
)
from quaver.nn.base import QuantizedModule
from quaver.nn.grouped_linear import GroupedLinear
from quaver.nn.init import quantized_model_init, seeded_init
from quaver.nn.layernorm_linear import LayerNormLinear
from quaver.nn.layernorm_mlp import LayerNormMLP
from quaver.nn.linear import Linear, QuantizedLinear
from quaver.nn.norm import LayerNorm, RMSNorm
from quaver.nn.padding import Fp8Padding, Fp8Unpadding
from quaver.nn.random import RNGStatesTracker
from quaver.nn.recompute import checkpoint
from quaver.nn.rope import RotaryPositionEmbedding
from quaver.nn.transformer import LayerOptions, TransformerLayer
from quaver.nn.wgrad import WgradOptions

__all__ = [
    "AttentionOptions",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerOptions",
    "Linear",
    "MultiheadAttention",
    "QKNorm",
    "QuantizedLinear",
    "QuantizedModule",
    "RMSNorm",
    "RNGStatesTracker",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "WgradOptions",
    "checkpoint",
    "quantized_model_init",
    "seeded_init",
]
