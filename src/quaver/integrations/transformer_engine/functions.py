"""Functions with the arguments that scripts pass: of experts, losses, graphs, utilities."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from quaver import functional
from quaver.devices import capability, default_device
from quaver.errors import QuaverError
from quaver.functional.permutation import MapType
from quaver.integrations.transformer_engine.options import INIT_STD, transformer_engine_name

# ---- mixtures of experts


@transformer_engine_name("transformer_engine.pytorch.permutation")
def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """quaver.moe_permute; it needs no workspace, which `max_token_num` would be the size of."""
    return functional.moe_permute(inp, routing_map, num_out_tokens, map_type)


@transformer_engine_name("transformer_engine.pytorch.permutation")
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: MapType = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """quaver.moe_unpermute; `probs` is an older name of `merging_probs`."""
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("probs is an older name of merging_probs; give one of them")
        warnings.warn("probs is an older name of merging_probs", stacklevel=2)
        merging_probs = probs
    shape = (row_id_map.shape[0], inp.shape[1])
    if restore_shape is not None and tuple(restore_shape) != shape:
        raise ValueError(f"restore_shape must be {shape}, not {tuple(restore_shape)}")
    return functional.moe_unpermute(inp, row_id_map, merging_probs)


@transformer_engine_name("transformer_engine.pytorch.permutation")
def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """quaver.moe_sort_chunks_by_index of the rows and of a probability for each."""
    sort = functional.moe_sort_chunks_by_index
    return sort(inp, split_sizes, sorted_index), sort(probs, split_sizes, sorted_index)


# ---- losses


@transformer_engine_name("transformer_engine.pytorch.cross_entropy")
def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """quaver.parallel_cross_entropy, which can always be captured."""
    return functional.parallel_cross_entropy(
        inp, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx
    )


# ---- graphs


@transformer_engine_name("transformer_engine.pytorch.graph")
def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    fp8_enabled: bool = False,
    enabled: bool | None = None,
    **others: Any,
) -> Any:
    """The device's own make_graphed_callables, for modules in high precision.

    Raises:
        QuaverError: FP8, or an option that it does not have.
    """
    unknown = [name for name, value in others.items() if value]
    if fp8_enabled or enabled or unknown:
        what = "FP8 modules" if not unknown else ", ".join(unknown)
        raise QuaverError(
            f"make_graphed_callables does not take {what}: use torch.compile, which captures FP8 "
            "modules too"
        )
    first = sample_args[0]
    while isinstance(first, tuple | list):
        first = first[0]
    backend = torch.get_device_module(first.device.type)
    graph = getattr(backend, "make_graphed_callables", None)
    if graph is None:
        raise QuaverError(f"there are no graphs on {first.device}; call the modules themselves")
    return graph(modules, sample_args, num_warmup_iters, allow_unused_input)


# ---- what is refused unless it is switched off


@transformer_engine_name("transformer_engine.pytorch.cpu_offload")
def get_cpu_offload_context(
    enabled: bool = False, *args: Any, **kwargs: Any
) -> tuple[AbstractContextManager[None], Callable[[Any], Any]]:
    """A context that does nothing, and a function that returns what it is given.

    Raises:
        QuaverError: offloading of activations is enabled.
    """
    if enabled:
        raise QuaverError(
            "activations are not offloaded; use torch.autograd.graph.save_on_cpu, or "
            "transformer_engine.pytorch.checkpoint"
        )
    return nullcontext(), lambda tensor: tensor


@transformer_engine_name("transformer_engine.pytorch.module")
def initialize_ub(*args: Any, **kwargs: Any) -> None:
    """Refuse: there are no userbuffers.

    Raises:
        QuaverError: always.
    """
    raise QuaverError("there are no userbuffers to overlap communication with; do without them")


@transformer_engine_name("transformer_engine.pytorch.module")
def destroy_ub() -> None:
    """Do nothing: there are no userbuffers."""


# ---- utilities


def get_device_compute_capability() -> tuple[int, int]:
    """That of the current device; (0, 0) where there is no such thing."""
    return capability(default_device())


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bfloat16 runs here (it does everywhere); if asked, also why not."""
    return (True, "") if return_reason else True


def is_bf16_compatible() -> bool:
    """The older name of `is_bf16_available`."""
    return True


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in `dtype`."""
    return None if tensor is None else tensor.to(dtype)


def divide(numerator: int, denominator: int) -> int:
    """The quotient of two integers without a remainder.

    Raises:
        ValueError: there is one.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} must be a multiple of {denominator}")
    return numerator // denominator


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Whether FP8 takes a tensor of this shape; it takes every shape."""
    return True


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Do nothing: FP8 takes every shape."""


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that fills a tensor from a normal distribution."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def get_default_init_method() -> Callable[[torch.Tensor], torch.Tensor]:
    """What weights are drawn with where nothing else is given."""
    return init_method_normal(INIT_STD)
