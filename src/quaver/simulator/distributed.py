"""Collectives on simulated devices: gloo, on zero-copy CPU aliases of the tensors.

A process group takes them with ``init_process_group("cpu:gloo,sim:gloo")``; DDP, DTensor and FSDP2
then work on simulated devices.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

_COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_",
    "gather_",
    "scatter_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "send",
    "recv_",
    "recv_any_source_",
)
_registered: list[torch.library.Library] = []  # a library's kernels live as long as it does


def register_collectives() -> None:
    """Let torch.distributed's collectives run on simulated devices."""
    if not torch.distributed.is_available():
        return
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch has kernels for this key; they look for a backend of the device type's own
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in _COLLECTIVES:
            library.impl(name, _on_cpu(name), "PrivateUse1")
    _registered.append(library)


def _on_cpu(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.c10d, name).default

    def collective(*args: Any) -> Any:
        return op(*[_alias(arg) for arg in args])

    return collective


def _alias(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ops.quaver_sim.as_cpu(value.detach()) if value.device.type == "sim" else value
    return [_alias(v) for v in value] if isinstance(value, (list, tuple)) else value
