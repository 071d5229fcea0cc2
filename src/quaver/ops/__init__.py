"""Fusible operations, and the containers that compute them together."""

from quaver.ops.basic import BasicLinear, Bias, FusibleOperation, Linear
from quaver.ops.fuser import OperationFuser
from quaver.ops.sequential import Sequential

__all__ = ["BasicLinear", "Bias", "FusibleOperation", "Linear", "OperationFuser", "Sequential"]
