"""Run a causal language model over token windows, and keep little of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

import quaver as qv
from quaver.cli.demo.metrics import Comparison, compare
from quaver.recipe import Recipe

Step = Callable[[], None]
"""Called after each window, for a progress bar."""


def logits(model: nn.Module, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The model's logits for ids of shape (1, n), as a CPU tensor of shape (1, n, vocabulary).

    ``device`` is that of the model's first layer. Nothing is recorded: the scales stay as they are.
    """
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return output.cpu()


def calibrate(
    model: nn.Module,
    windows: Iterable[torch.Tensor],
    recipe: Recipe,
    device: torch.device,
    step: Step,
) -> None:
    """Let layers of delayed scaling see what they will be given: scales from high precision."""
    for window in windows:
        with qv.autocast(enabled=False, calibrating=True, recipe=recipe):
            logits(model, window, device)
        step()


def compare_with(
    model: nn.Module,
    windows: Iterable[torch.Tensor],
    reference: Iterable[torch.Tensor],
    device: torch.device,
    step: Step,
) -> tuple[Comparison, list[str]]:
    """Compare the model with full-precision logits; also the fingerprint of its own, by window."""
    total = Comparison()
    prints: list[str] = []
    for window, full in zip(windows, reference, strict=True):
        own = logits(model, window, device)
        total += compare(full, own, window)
        prints.append(fingerprint(own))
        step()
    return total, prints


def fingerprint(values: torch.Tensor) -> str:
    """A hash of every bit of a tensor, its dtype and shape: equal for equal tensors only.

    Two sets of logits are compared bit for bit without keeping either.
    """
    digest = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)} ".encode(), digest_size=32)
    digest.update(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
