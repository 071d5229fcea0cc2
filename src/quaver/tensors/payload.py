"""A quantized tensor as plain tensors, which is what travels inside Quaver."""

from typing import NamedTuple

import torch


class Payload(NamedTuple):
    """x ≈ data * scale_inv.

    Attributes:
        data: FP8, the shape of x.
        scale_inv: float32 [1].
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
