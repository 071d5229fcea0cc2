"""Adam on torch's fused kernels, with float32 masters of quantized and low-precision weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quaver.optim.master_weights import MasterWeights

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class FusedAdam(MasterWeights):
    """torch.optim.AdamW or Adam, fused on devices that have that kernel, with master weights.

    Quantized parameters always have float32 masters, as in `MasterWeights`: small steps would round
    away otherwise. The moments of a parameter have its dtype, or float32 if it has a master.

    Args:
        params: parameters or parameter groups; they may lie on several devices.
        lr: the learning rate.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the denominator.
        weight_decay: how much of a weight a step takes away, times lr.
        adam_w_mode: decay the weights apart from the moments (AdamW); False: L2 (Adam).
        master_weights: give bfloat16 and float16 parameters float32 masters, too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        optimizer = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        super().__init__(params, optimizer, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for any optimizer; `fused` is set where all their devices serve it."""
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        fused = all(_has_fused_kernel(tensor.device) for tensor in tensors)
        super().add_param_group({"fused": fused or None, **param_group, "params": params})

    def _needs_master(self, weight: torch.Tensor) -> bool:
        low = self.master_weights and weight.dtype in _LOW_PRECISION
        return low or super()._needs_master(weight)


def _has_fused_kernel(device: torch.device) -> bool:
    if device.type == "meta":
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key)
