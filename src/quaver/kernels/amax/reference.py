"""The largest magnitude of a tensor, written out as a specification."""

import torch


def max_abs(x: torch.Tensor) -> torch.Tensor:
    """max|x| as a float32 scalar tensor: NaN is passed over, inf counts, nothing at all gives 0."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    return magnitude.amax().to(torch.float32)


def amax(x: torch.Tensor, into: torch.Tensor, slot: int) -> None:
    """Raise cell `slot` of `into` to max|x|.

    Args:
        x: any shape, a floating-point dtype.
        into: float32, contiguous; its flat element `slot` is read and written.
        slot: which element.
    """
    cell = into.view(-1)[slot]
    cell.copy_(torch.maximum(cell, max_abs(x)))
