"""Sequential: torch's, which computes runs of fusible operations through the fuser."""

from __future__ import annotations

import torch
from torch import nn

from quaver.ops.basic import FusibleOperation
from quaver.ops.fuser import OperationFuser


class Sequential(nn.Sequential):
    """torch.nn.Sequential; adjacent fusible operations are computed together.

    Other modules may stand between them, and are called as they are.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last module."""
        run: list[FusibleOperation] = []
        for module in self:
            if isinstance(module, FusibleOperation):
                run.append(module)
                continue
            if run:
                x, run = OperationFuser(run)(x), []
            x = module(x)
        return OperationFuser(run)(x) if run else x
