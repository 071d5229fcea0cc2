"""Cross entropy of logits whose vocabulary may be split over processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quaver.devices import on_device, operands_device


class _Share(NamedTuple):
    """This process's part of the vocabulary.

    Attributes:
        group: whose members have one part each; None: this process has all of it.
        first: the number of the first entry.
        total: how many entries the whole vocabulary has.
        smoothing: the weight of the uniform distribution in the target.
    """

    group: Any
    first: int
    total: int
    smoothing: float


def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
) -> torch.Tensor:
    """Cross entropy, computed in float32.

    loss = log(sum_v exp(x_v)) - (1 - s) x_target - s mean_v(x_v), where s is `label_smoothing` and
    v goes over the whole vocabulary, as in torch.nn.functional.cross_entropy.

    Args:
        logits: [..., V / ranks], this rank's equal share of the vocabulary, in order of the ranks.
        target: [...], integers from 0 to V - 1, or `ignore_idx`; the same on every rank.
        label_smoothing: from 0 to 1.
        reduce_loss: return the mean over what is not ignored (0 if all is).
        dist_process_group: the ranks that share the vocabulary; None: this one has all of it.
        ignore_idx: a target with loss and gradient 0.

    Returns:
        float32, target's shape, or a scalar; NaN where a target is out of range. The gradient has
        logits' dtype.

    Raises:
        ValueError: the shapes or target's dtype do not fit, or label_smoothing is out of range.
        DeviceMismatchError: logits and target lie on two devices.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the shape of logits without its last dimension, "
            f"{tuple(logits.shape[:-1])}, not {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target must have the dtype int64 or int32, not {target.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    size, rank, ranks = logits.shape[-1], 0, 1
    if dist_process_group is not None:
        rank, ranks = dist.get_rank(dist_process_group), dist.get_world_size(dist_process_group)
    share = _Share(
        dist_process_group if ranks > 1 else None, rank * size, ranks * size, label_smoothing
    )
    with on_device(operands_device(("logits", "target"), (logits, target))):
        losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.reshape(-1, size), target.reshape(-1), share, ignore_idx
        )
        if reduce_loss:
            counted = (target != ignore_idx).sum().clamp(min=1)
            mean: torch.Tensor = losses.sum() / counted
            return mean
        return losses.reshape(target.shape)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, share: _Share, ignore_idx: int
    ) -> torch.Tensor:
        x = logits.float()
        local, mine = _local(target, share, x.shape[1])
        highest = x.max(dim=1).values if x.shape[1] else x.new_full(target.shape, float("-inf"))
        if share.group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=share.group)
        shifted = x - highest.unsqueeze(1)
        own = torch.where(mine, shifted.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)
        sums = torch.stack((shifted.exp().sum(1), own, shifted.sum(1)))
        if share.group is not None:
            dist.all_reduce(sums, group=share.group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, target, highest + log_sum)
        ctx.share, ctx.ignore_idx = share, ignore_idx
        smoothing = share.smoothing
        loss = log_sum - (1.0 - smoothing) * sums[1]
        if smoothing:  # without it an entry of -inf has no part in the mean
            loss -= smoothing * sums[2] / share.total
        return _marked(loss, target, share, ignore_idx)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, log_sum = ctx.saved_tensors
        share: _Share = ctx.share
        with on_device(grad.device):
            dx = (logits.float() - log_sum.unsqueeze(1)).exp_()
            dx -= share.smoothing / share.total
            local, mine = _local(target, share, dx.shape[1])
            # One entry a row: nothing is accumulated.
            rows = torch.arange(dx.shape[0], device=dx.device)
            dx[rows, local] -= torch.where(mine, 1.0 - share.smoothing, 0.0)
            scale = _marked(grad.float(), target, share, ctx.ignore_idx)
            ignored = (target == ctx.ignore_idx).unsqueeze(1)
            dx = torch.where(ignored, 0.0, dx * scale.unsqueeze(1))
            return dx.to(logits.dtype), None, None, None


def _local(target: torch.Tensor, share: _Share, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's place in this share, and whether it is in it at all."""
    place = target - share.first
    mine = (place >= 0) & (place < size)
    return torch.where(mine, place, 0), mine


def _marked(
    value: torch.Tensor, target: torch.Tensor, share: _Share, ignore_idx: int
) -> torch.Tensor:
    """`value` of each row: 0 for an ignored target, NaN for one that is out of range."""
    outside = (target < 0) | (target >= share.total)
    value = torch.where(outside, float("nan"), value)
    return torch.where(target == ignore_idx, 0.0, value)
