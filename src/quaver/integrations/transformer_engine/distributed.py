"""`transformer_engine.pytorch.distributed`: recomputation, and collectives along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.options import transformer_engine_name
from quaver.nn import checkpoint as native_checkpoint

_NAME = "transformer_engine.pytorch.distributed"
_MAX_LEGACY = 3


@transformer_engine_name(_NAME)
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """quaver.nn.checkpoint, reentrant unless told, with the options that scripts pass.

    The older form has `distribute_saved_activations`, the tracker and the group as the first three
    arguments; it is known by the first of them, a bool.
    """
    legacy: dict[str, Any] = {}
    if args and isinstance(args[0], bool):
        names = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
        legacy = dict(zip(names, args[:_MAX_LEGACY], strict=False))
        args = args[_MAX_LEGACY:]
    kwargs = {"use_reentrant": True, **legacy, **kwargs}
    if kwargs.pop("distribute_saved_activations", False):
        raise QuaverError(
            "checkpoint(distribute_saved_activations=True) is not taken: there is one process"
        )
    kwargs.pop("tp_group", None)
    return native_checkpoint(function, *args, **kwargs)


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Do nothing: a recomputation is known as such without being told."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """False: nothing needs to be told of it."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this runs inside a backward pass, as a recomputation does."""
    return torch._C._current_graph_task_id() != -1


def get_distributed_world_size(group: Any = None) -> int:
    """How many processes a group has; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """This process's number in a group."""
    return dist.get_rank(group)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Note on a tensor how it is split over processes."""
    for name, value in (
        ("tensor_model_parallel", is_parallel),
        ("partition_dim", dim),
        ("partition_stride", stride),
    ):
        setattr(tensor, name, value)


def allreduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Add a tensor up over a group, in place; and the handle of the operation."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any = None, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """All tensors of a group, one after the other; and the handle of the operation."""
    size = get_distributed_world_size(process_group)
    if size == 1:
        return inp, None
    out = inp.new_empty(inp.shape[0] * size, *inp.shape[1:])
    handle = dist.all_gather_into_tensor(
        out, inp.contiguous(), group=process_group, async_op=async_op
    )
    return out, handle


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """This process's part of the sum over a group; and the handle of the operation."""
    size = get_distributed_world_size(tp_group)
    if size == 1:
        return inp, None
    if inp.shape[0] % size:
        raise ValueError(f"the first dimension, {inp.shape[0]}, must be a multiple of {size}")
    out = inp.new_empty(inp.shape[0] // size, *inp.shape[1:])
    handle = dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group, async_op=async_op)
    return out, handle
