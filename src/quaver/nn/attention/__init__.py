"""Attention modules."""

from quaver.nn.attention.dot_product import DotProductAttention
from quaver.nn.attention.inference import InferenceParams
from quaver.nn.attention.multihead import MultiheadAttention
from quaver.nn.attention.options import AttentionOptions, QKNorm

__all__ = [
    "AttentionOptions",
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "QKNorm",
]
