"""What the shim's modules have beside Quaver's own: the attributes that scripts reach for."""

from __future__ import annotations

from typing import Any

from quaver.integrations.transformer_engine.fp8_meta import Fp8Meta
from quaver.integrations.transformer_engine.options import (
    refuse_parallel,
    transformer_engine_name,
)
from quaver.nn import QuantizedModule
from quaver.scaling import current_region
from quaver.tensors import QuantizedTensor


@transformer_engine_name("transformer_engine.pytorch.module.base")
class TransformerEngineBaseModule(QuantizedModule):
    """Mixin: `fp8_meta` and its kin, views of what the module keeps.

    Attributes:
        tp_size, tp_group, sequence_parallel: there is one process; they say so.
        fp8_meta_tensors_initialized: may be written; states are made when they are needed.
    """

    tp_size = 1
    tp_group: Any = None
    tp_group_initialized = True
    sequence_parallel = False
    fp8_meta_tensors_initialized = True

    @property
    def fp8_meta(self) -> Fp8Meta:
        """The module's recipe states in the form of a dictionary."""
        notes: dict[str, Any] = self.__dict__.setdefault("_fp8_notes", {})
        return Fp8Meta(self, notes)

    @property
    def fp8(self) -> bool:
        """Whether a forward that begins now would quantize."""
        region = current_region()
        return region.enabled if region is not None else self.recipe is not None

    @property
    def fp8_calibration(self) -> bool:
        """Whether a forward that begins now would calibrate."""
        region = current_region()
        return region is not None and region.calibrating

    @property
    def fp8_initialized(self) -> bool:
        """Whether the module has recipe states."""
        return bool(self.recipe_states)

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether a weight is quantized."""
        return any(isinstance(p, QuantizedTensor) for p in self.parameters(recurse=False))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the recipe states now, for as many products as the module has."""
        for key in ("scaling_fwd", "scaling_bwd"):
            _ = self.fp8_meta[key]

    def reset_fp8_meta_tensors(self) -> None:
        """Begin with new recipe states."""
        self.recipe_states = {}
        self._prepared = None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Accept a group of one process.

        Raises:
            QuaverError: it has more.
        """
        refuse_parallel(type(self).__name__, tp_group, 1)
