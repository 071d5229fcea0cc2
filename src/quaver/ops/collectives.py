"""Collectives as fusible operations, with the gradients that tensor parallelism needs."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from quaver.devices import on_device
from quaver.errors import QuaverError
from quaver.ops.operation import FusibleOperation


class _Collective(FusibleOperation):
    """Base of the collectives.

    Args:
        process_group: whose ranks take part; None: all. Alone, or where torch.distributed is not
            initialized, y is x.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def _size(self, x: torch.Tensor) -> int:
        """How many ranks there are.

        Raises:
            QuaverError: x is a scalar.
        """
        if x.dim() == 0:
            raise QuaverError(f"{type(self).__name__} takes x of at least one dimension")
        if not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self.process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Collective:
        memo[id(self.process_group)] = self.process_group  # it is this process's, not the module's
        twin: _Collective = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class AllGather(_Collective):
    """y = the x of all ranks, one after the other along the first dimension.

    Backward: the gradients of all ranks are added, and each rank gets its part.

    Args:
        process_group: whose ranks take part; None: all. Alone, or where torch.distributed is not
            initialized, y is x.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, ...] to [ranks * M, ...]; M is the same on every rank."""
        size = self._size(x)
        return x if size == 1 else _apply(_AllGather, x, self.process_group, size)


class ReduceScatter(_Collective):
    """y = this rank's part of the sum of all ranks' x, along the first dimension.

    Backward: the gradients of all ranks, one after the other.

    Args:
        process_group: whose ranks take part; None: all. Alone, or where torch.distributed is not
            initialized, y is x.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks * M, ...] to [M, ...].

        Raises:
            QuaverError: the number of ranks does not divide x's first dimension.
        """
        size = self._size(x)
        if x.shape[0] % size:
            raise QuaverError(
                f"x's first dimension must be a multiple of the {size} ranks, not {x.shape[0]}"
            )
        return x if size == 1 else _apply(_ReduceScatter, x, self.process_group, size)


class AllReduce(_Collective):
    """y = the sum of all ranks' x.

    Backward: the gradient passes unchanged, since what follows is the same on every rank.

    Args:
        process_group: whose ranks take part; None: all. Alone, or where torch.distributed is not
            initialized, y is x.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in x's shape and dtype."""
        size = self._size(x)
        return x if size == 1 else _apply(_AllReduce, x, self.process_group, size)


def _apply(function: Any, x: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> Any:
    with on_device(x.device):
        return function.apply(x, group, size)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
    y = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(y, x.contiguous(), group=group)
    return y


def _scattered(x: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> torch.Tensor:
    y = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_tensor(y, x.contiguous(), group=group)
    return y


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.ranks = (group, size)
        return _gathered(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ReduceScatter.apply(grad, *ctx.ranks), None, None  # type: ignore[no-untyped-call]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.ranks = (group, size)
        return _scattered(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllGather.apply(grad, *ctx.ranks), None, None  # type: ignore[no-untyped-call]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None
