"""Attention: written out as the reference, and by torch's kernels where they serve."""

from quaver.functional.attention.backends import Backend, Needs, attention_backend
from quaver.functional.attention.quantize import AttentionPlan
from quaver.functional.attention.reference import reference_attention
from quaver.functional.attention.scores import SOFTMAX_TYPES, Scores
from quaver.functional.attention.sdpa import sdpa_attention

__all__ = [
    "SOFTMAX_TYPES",
    "AttentionPlan",
    "Backend",
    "Needs",
    "Scores",
    "attention_backend",
    "reference_attention",
    "sdpa_attention",
]
