"""`transformer_engine.pytorch.optimizers.FusedAdam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quaver import optim
from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.options import transformer_engine_name

_ONLY: dict[str, Any] = {
    "amsgrad": False,
    "bias_correction": True,
    "capturable": False,
    "master_weight_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "use_decoupled_grad": False,
    "store_param_remainders": False,
}


@transformer_engine_name("transformer_engine.pytorch.optimizers")
class FusedAdam(optim.FusedAdam):
    """quaver.optim.FusedAdam; options that it does not have are taken at their defaults alone.

    The moments of a bfloat16 or float16 parameter without a master have its dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        given = locals()
        for name, only in _ONLY.items():
            if given[name] != only:
                raise QuaverError(f"FusedAdam({name}={given[name]!r}) is not taken, only {only!r}")
        if set_grad_none is False:
            raise QuaverError("FusedAdam(set_grad_none=False): use zero_grad(set_to_none=False)")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=bool(adam_w_mode),
            master_weights=bool(master_weights),
        )
