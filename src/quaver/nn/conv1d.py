"""transformers' Conv1D in FP8: a linear layer whose weight is stored transposed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.functional import dequantized
from quaver.nn.linear import QuantizedLinear


class QuantizedConv1D(QuantizedLinear):
    """Mixin for transformers' Conv1D: weight [in_features, out_features], always a bias.

    transformers is optional, so the whole class is made by `combined_class` when a model has one.
    """

    bias: torch.Tensor

    def weight_matrix(self, gemm: int = 0) -> torch.Tensor:
        """The weight as [out_features, in_features], a view."""
        return self.weight.t()

    def forward_high_precision(self, x: torch.Tensor) -> torch.Tensor:
        """As transformers computes it."""
        weight = dequantized(self.weight)
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), weight)
        return rows.view(*x.shape[:-1], weight.shape[1])


_combined: dict[tuple[type, type], type[QuantizedLinear]] = {}


def combined_class(mixin: type[QuantizedLinear], base: type[nn.Module]) -> type[QuantizedLinear]:
    """The class of `base`'s name that is both; the same one at every call.

    It can be pickled and deep-copied although no module has it as an attribute: its objects are
    rebuilt from `mixin` and `base`.
    """
    if (mixin, base) not in _combined:

        def reduce(self: Any, protocol: Any) -> Any:
            state = base.__reduce_ex__(self, 2)[2:]
            return (_new_combined, (mixin, base), *state)

        members = {
            "__module__": mixin.__module__,
            "__doc__": base.__doc__,
            "__reduce_ex__": reduce,
        }
        _combined[mixin, base] = type(base.__name__, (mixin, base), members)
    return _combined[mixin, base]


def _new_combined(mixin: type[QuantizedLinear], base: type[nn.Module]) -> QuantizedLinear:
    cls = combined_class(mixin, base)
    return cls.__new__(cls)
