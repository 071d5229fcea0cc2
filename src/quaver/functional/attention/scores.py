"""What attention computes, apart from its operands; what every backend is told."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

SOFTMAX_TYPES: Final = ("vanilla", "off-by-one", "learnable")


class Scores(NamedTuple):
    """How scores are made, masked and normalized.

    Attributes:
        scale: multiplies q k^T.
        allowed: bool [b or 1, h or 1, sq, sk], which keys a query may attend to; None: all, or with
            `causal` those up to its own.
        causal: query i attends to the keys 0 to i; `allowed` and `bias` are None.
        bias: float32 [b or 1, h or 1, sq, sk], added to the scaled scores; or None.
        sink: [h], a score of each head that takes its part in the softmax and has no value
            (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023); "off by
            one" is a sink of 0. None: a plain softmax.
        dropout: the probability with which a weight is dropped; 0 in evaluation.
    """

    scale: float
    allowed: torch.Tensor | None = None
    causal: bool = False
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dropout: float = 0.0
