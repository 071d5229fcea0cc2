"""Optimizers."""

from quaver.optim.fused_adam import FusedAdam
from quaver.optim.master_weights import MasterWeights

__all__ = ["FusedAdam", "MasterWeights"]
