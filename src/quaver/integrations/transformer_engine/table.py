"""Which names each module of `transformer_engine` has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from quaver import nn, quantizers, scaling, tensors
from quaver.devices import default_device
from quaver.functional import moe_permute_with_probs, moe_sort_chunks_by_index
from quaver.integrations.transformer_engine import (
    attention,
    distributed,
    extension,
    functions,
    layernorm_linear,
    linear,
    norms,
    operations,
    optimizers,
    quantization,
    recipes,
    transformer,
)
from quaver.integrations.transformer_engine.base import TransformerEngineBaseModule
from quaver.integrations.transformer_engine.enumerations import ENUMERATIONS
from quaver.integrations.transformer_engine.manager import FP8GlobalStateManager
from quaver.nn.padding import Fp8Padding, Fp8Unpadding
from quaver.quantizers.base import Quantizer
from quaver.scaling.delayed import DelayedScalingState

VERSION = "2.9.0"
"""The version that scripts are told, whose names and options the shim has."""

Contents = dict[str, Any]


def _named(*things: Any) -> Contents:
    return {thing.__name__: thing for thing in things}


def _workspace() -> torch.Tensor:
    """A small tensor on the current device; Quaver keeps its own workspaces, by device."""
    return torch.empty(1, dtype=torch.uint8, device=default_device())


def _quantized() -> Contents:
    return {
        **_named(tensors.QuantizedTensor, Quantizer, tensors.Float8Tensor, tensors.MXFP8Tensor),
        **_named(tensors.NVFP4Tensor, quantizers.Float8Quantizer, quantizers.MXFP8Quantizer),
        **_named(quantizers.Float8CurrentScalingQuantizer, quantizers.Float8BlockQuantizer),
        **_named(quantizers.NVFP4Quantizer, quantizers.IdentityQuantizer),
        "Float8BlockwiseQTensor": tensors.Float8BlockwiseTensor,
    }


def _fp8() -> Contents:
    check, available = quantization.check_support, quantization.is_available
    kinds = ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")
    return {
        **{f"check_{kind}_support": check for kind in kinds},
        **{f"is_{kind}_available": available for kind in kinds},
        **_named(quantization.autocast, quantization.fp8_autocast, quantization.fp8_model_init),
        **_named(quantization.check_recipe_support, quantization.get_default_fp8_recipe),
        **_named(quantization.get_fp8_torch_dtype, quantization.get_fp8_te_dtype),
        **_named(quantization.get_fp8_max, quantization.get_align_size_for_quantization),
        **_named(nn.quantized_model_init, FP8GlobalStateManager, scaling.RecipeState),
        "get_default_recipe": quantization.get_default_fp8_recipe,
        "DelayedScalingRecipeState": DelayedScalingState,
        **recipes.contents(),
    }


def _modules() -> Contents:
    return {
        **_named(linear.Linear, linear.GroupedLinear, norms.LayerNorm, norms.RMSNorm),
        **_named(layernorm_linear.LayerNormLinear, layernorm_linear.LayerNormMLP),
        **_named(Fp8Padding, Fp8Unpadding, TransformerEngineBaseModule),
        **_named(functions.initialize_ub, functions.destroy_ub),
    }


def _attention() -> Contents:
    return {
        **_named(attention.DotProductAttention, attention.MultiheadAttention),
        **_named(nn.attention.InferenceParams, nn.RotaryPositionEmbedding),
    }


def _workspaces() -> Contents:
    return {"_cublas_workspace": None, "get_workspace": _workspace}


def _permutation() -> Contents:
    return {
        **_named(functions.moe_permute, functions.moe_unpermute, moe_permute_with_probs),
        **_named(moe_sort_chunks_by_index, functions.moe_sort_chunks_by_index_with_probs),
    }


def _distributed() -> Contents:
    names = [name for name in vars(distributed) if not name.startswith("_")]
    own = {name: getattr(distributed, name) for name in names}
    functions_here = {n: f for n, f in own.items() if callable(f) and hasattr(f, "__code__")}
    return {**functions_here, "CudaRNGStatesTracker": nn.RNGStatesTracker}


def _utils() -> Contents:
    return {
        **_named(functions.get_device_compute_capability, functions.is_bf16_available),
        **_named(functions.is_bf16_compatible, functions.cast_if_needed, functions.divide),
        **_named(functions.check_dim_for_fp8_exec, functions.assert_dim_for_fp8_exec),
        **_named(functions.init_method_normal, functions.get_default_init_method),
    }


def _constants() -> Contents:
    return {
        "TE_DType": extension.TE_DTYPE,
        "TE_DType_To_Torch": extension.TORCH_DTYPE,
        "DType": extension.DType,
        "AttnTypes": ("self", "cross"),
        "LayerTypes": ("encoder", "decoder"),
        "GemmParallelModes": ("row", "column", None),
        "AttnMaskTypes": (
            *("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"),
            *("padding_causal_bottom_right", "arbitrary"),
        ),
        "AttnBiasTypes": ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi"),
        "MXFP8_BLOCK_SCALING_SIZE": 32,
        "NVFP4_BLOCK_SCALING_SIZE": 16,
        "dist_group_type": dist.ProcessGroup if dist.is_available() else object,
    }


def _pytorch() -> Contents:
    graphed = functions.make_graphed_callables
    return {
        **{k: v for k, v in _fp8().items() if k not in recipes.contents()},
        **_modules(),
        **_attention(),
        **_permutation(),
        **_quantized(),
        **_named(transformer.TransformerLayer, distributed.checkpoint, graphed),
        **_named(functions.parallel_cross_entropy, functions.get_device_compute_capability),
        **_named(functions.is_bf16_available, functions.get_cpu_offload_context),
        "CudaRNGStatesTracker": nn.RNGStatesTracker,
        "DType": extension.DType,
    }


_ROOT = "transformer_engine"
_TORCH = f"{_ROOT}.pytorch"


def _one(*things: Any) -> Callable[[], Contents]:
    return lambda: _named(*things)


MODULES: dict[str, Callable[[], Contents]] = {
    _ROOT: lambda: {"__version__": VERSION},
    f"{_ROOT}.common": dict,
    f"{_ROOT}.common.recipe": recipes.contents,
    _TORCH: _pytorch,
    **dict.fromkeys((f"{_TORCH}.fp8", f"{_TORCH}.quantization"), _fp8),
    f"{_TORCH}.quantized_tensor": _quantized,
    f"{_TORCH}.float8_tensor": _quantized,
    f"{_TORCH}.tensor": _quantized,
    **{
        f"{_TORCH}.tensor.{name}": _quantized
        for name in (
            *("quantized_tensor", "float8_tensor", "mxfp8_tensor", "nvfp4_tensor"),
            "float8_blockwise_tensor",
        )
    },
    f"{_TORCH}.module": _modules,
    f"{_TORCH}.module.base": lambda: {
        **_named(TransformerEngineBaseModule),
        **_workspaces(),
    },
    f"{_TORCH}.module.linear": lambda: {**_named(linear.Linear), **_workspaces()},
    f"{_TORCH}.module.grouped_linear": _one(linear.GroupedLinear),
    f"{_TORCH}.module.layernorm": _one(norms.LayerNorm),
    f"{_TORCH}.module.rmsnorm": _one(norms.RMSNorm),
    f"{_TORCH}.module.layernorm_linear": lambda: {
        **_named(layernorm_linear.LayerNormLinear),
        **_workspaces(),
    },
    f"{_TORCH}.module.layernorm_mlp": lambda: {
        **_named(layernorm_linear.LayerNormMLP),
        **_workspaces(),
    },
    f"{_TORCH}.module.fp8_padding": _one(Fp8Padding),
    f"{_TORCH}.module.fp8_unpadding": _one(Fp8Unpadding),
    f"{_TORCH}.attention": _attention,
    f"{_TORCH}.attention.rope": _one(nn.RotaryPositionEmbedding),
    f"{_TORCH}.attention.inference": _one(nn.attention.InferenceParams),
    f"{_TORCH}.attention.multi_head_attention": _one(attention.MultiheadAttention),
    f"{_TORCH}.attention.dot_product_attention": _one(attention.DotProductAttention),
    f"{_TORCH}.transformer": _one(transformer.TransformerLayer),
    f"{_TORCH}.distributed": _distributed,
    f"{_TORCH}.cpu_offload": _one(functions.get_cpu_offload_context),
    f"{_TORCH}.graph": _one(functions.make_graphed_callables),
    f"{_TORCH}.permutation": _permutation,
    f"{_TORCH}.cross_entropy": _one(functions.parallel_cross_entropy),
    f"{_TORCH}.optimizers": _one(optimizers.FusedAdam),
    f"{_TORCH}.optimizers.fused_adam": _one(optimizers.FusedAdam),
    f"{_TORCH}.utils": _utils,
    f"{_TORCH}.constants": _constants,
    f"{_TORCH}.ops": operations.contents,
    # the second is the older name
    **dict.fromkeys(
        ("transformer_engine_torch", "transformer_engine_extensions"),
        _one(extension.DType, extension.FP8FwdTensors, extension.FP8BwdTensors, *ENUMERATIONS),
    ),
}
"""What to put into each module, by its name."""
