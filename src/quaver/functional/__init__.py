"""Autograd functions: plain tensors in, plain tensors saved."""

from quaver.functional.activation import activation
from quaver.functional.cross_entropy import parallel_cross_entropy
from quaver.functional.dequantize import dequantized, handed_on, quantize
from quaver.functional.gemm import LinearPlan, quantize_weight
from quaver.functional.linear import activation_dtype, linear
from quaver.functional.norm import layer_norm, norm_dtype, rms_norm
from quaver.functional.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_unpermute,
)
from quaver.functional.rope import apply_rotary_pos_emb
from quaver.functional.wgrad import WeightGradient, plain_linear

__all__ = [
    "LinearPlan",
    "WeightGradient",
    "activation",
    "activation_dtype",
    "apply_rotary_pos_emb",
    "dequantized",
    "handed_on",
    "layer_norm",
    "linear",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_unpermute",
    "norm_dtype",
    "parallel_cross_entropy",
    "plain_linear",
    "quantize",
    "quantize_weight",
    "rms_norm",
]
