"""GroupedLinear as a fusible operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quaver.nn.grouped_linear import GroupedLinear as GroupedLinearModule
from quaver.nn.init import InitMethod
from quaver.nn.wgrad import WgradOptions
from quaver.ops.operation import FusibleOperation
from quaver.recipe import Recipe


class GroupedLinear(GroupedLinearModule, FusibleOperation):
    """Several linears, each for its own rows of x; the extra input says how many rows each has.

    Args:
        num_gemms, in_features, out_features, bias, device, dtype, recipe, wgrad, init_method: as
            for `quaver.GroupedLinear`. Its `return_bias` is not here, since operations pass on one
            tensor.
    """

    num_extra_inputs = 1

    def __init__(  # noqa: PLR0913 - as the module's, all but four by keyword
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        wgrad: WgradOptions | None = None,
        init_method: InitMethod | None = None,
    ) -> None:
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            device=device,
            dtype=dtype,
            recipe=recipe,
            wgrad=wgrad,
            init_method=init_method,
        )

    def forward(
        self,
        x: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Each group's rows through its own linear, as `quaver.GroupedLinear.forward`.

        Args:
            m_splits: how many rows each group has, as integers or an integer tensor [num_gemms].
                The sizes are needed on the host: a tensor on an accelerator is waited for.
        """
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
        y: torch.Tensor = super().forward(x, sizes, is_first_microbatch)
        return y
