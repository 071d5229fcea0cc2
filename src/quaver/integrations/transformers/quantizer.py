"""QuaverHfQuantizer: the steps of `from_pretrained` and `save_pretrained` that are Quaver's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from quaver.conversion import (
    DEFAULT_EXCLUDE,
    ConversionError,
    ConversionReport,
    convert,
    convert_back,
)
from quaver.conversion.places import weights_of
from quaver.conversion.plan import NO_VALUES_YET, make_plan
from quaver.conversion.rules import RuleList
from quaver.conversion.swap import conversion_of, record_quantized
from quaver.errors import CheckpointError
from quaver.integrations.transformers.config import METHOD, QuaverConfig
from quaver.integrations.transformers.operations import (
    SERIALIZED,
    QuantizeWeight,
    RestoreWeight,
    saved_parts,
)
from quaver.nn.loading import read_offloaded_state
from quaver.nn.weights import QuantizedWeights
from quaver.tensors import QuantizedTensor

_BYTES = {"mxfp8": 33 / 32, "nvfp4": 9 / 16}
"""Of a quantized weight, scales included; the others' scales are too few to count."""


@register_quantizer(METHOD)
class QuaverHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Makes the layers Quaver's before anything is loaded, and quantizes weights as they come.

    transformers reads a checkpoint for this quantizer one tensor at a time. So beside the
    quantized model, the most that is held in high precision is what stays so, and one weight.

    Attributes:
        quantized_layers: by qualified name, the layers that get quantized weights.
        restored: the names of those whose weights came quantized from the checkpoint.
        report: what was converted and what was not, as `quaver.convert` reports it.
    """

    requires_calibration = False
    quantization_config: QuaverConfig
    serialized_names = SERIALIZED

    def __init__(self, quantization_config: QuaverConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.quantized_layers: dict[str, QuantizedWeights] = {}
        self.restored: set[str] = set()
        self.report = ConversionReport()

    @property
    def _quantizes(self) -> bool:
        return self.quantization_config.weights == "quantize"

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what cannot be loaded.

        Raises:
            ConversionError: quantized weights are to be offloaded to disk.
        """
        on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if on_disk and self._quantizes:
            raise ConversionError(
                "quantized weights cannot be offloaded to disk; give the device map 'cpu' instead "
                "of 'disk', or QuaverConfig weights='keep'"
            )

    # ---- before the weights are loaded: the model is on the meta device

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        recipe = config.make_recipe()
        exclude = [*config.keep_in_high_precision, *_kept_by_the_model(model)]
        if self._quantizes:
            tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
            plan = make_plan(
                model,
                recipe,
                RuleList((), None, exclude),
                quantize=True,
                include_subclasses=False,
                values_later=True,
            )
            self.quantized_layers = {
                layer.name: cast(QuantizedWeights, layer.module)
                for layer in plan.layers
                if layer.quantize
                and f"{layer.name}.weight" not in tied
                and weights_of(layer.module).keys() == {"weight"}
            }
        self.report = convert(model, recipe, exclude=exclude)
        for layer in self.quantized_layers.values():
            layer.weight.requires_grad_(False)
            if self.pre_quantized:
                layer.quantize_weight()
        # A checkpoint from before the conversion has no scaling states, and needs none.
        ignored = list(model._keys_to_ignore_on_load_missing or ())
        model._keys_to_ignore_on_load_missing = [*ignored, r"_extra_state$"]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether this is the weight of a layer that gets a quantized one, of plain values."""
        layer, _, parameter = param_name.rpartition(".")
        return not self.pre_quantized and parameter == "weight" and layer in self.quantized_layers

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element as it will be held, for device maps that are inferred."""
        layer, _, parameter = param_name.rpartition(".")
        if parameter == "weight" and layer in self.quantized_layers:
            return _BYTES.get(self.quantization_config.recipe, 1.0)
        return param.element_size()

    def get_quantize_ops(self) -> QuantizeWeight:
        """What makes a quantized weight of a plain one."""
        return QuantizeWeight(self)

    def get_load_operations(self) -> dict[str, Any]:
        """What makes a quantized weight of its saved parts."""
        return {"deserialize": RestoreWeight} if self._quantizes else {}

    # ---- after

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        lost = sorted(self.quantized_layers.keys() - self.restored) if self.pre_quantized else []
        if lost:
            raise CheckpointError(
                f"the checkpoint must have the quantized weights of {lost[0]}, but has not, nor "
                f"those of {len(lost) - 1} other layers"
            )
        for layer in self.quantized_layers.values():
            # One that the checkpoint lacks was initialized just now, in high precision.
            if layer.weight.device.type != "meta":
                layer.quantize_weight()
            layer.weight.requires_grad_(False)
            record_quantized(layer)
        for module in model.modules():
            if isinstance(module, QuantizedWeights):
                _complete_state(module)
        # These would be undone on saving; `get_state_dict_and_metadata` does it already.
        model._weight_conversions = [
            each
            for each in getattr(model, "_weight_conversions", None) or ()
            if not any(isinstance(op, RestoreWeight) for op in getattr(each, "operations", ()))
        ]
        self.report = _completed(self.report, model, self.quantization_config)
        return model

    # ---- saving and undoing

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The model's state with quantized weights in parts.

        After `convert_back` it is that of a plain model, which its config must then say, too.
        """
        if not any(conversion_of(module) for module in model.modules()):
            self.remove_quantization_config(model)
        return saved_parts(model)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        convert_back(model)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: yes."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights themselves can be trained: those that stay in high precision."""
        return not self._quantizes

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile traces the model: not quantized weights."""
        return not self._quantizes


def _kept_by_the_model(model: Any) -> list[str]:
    """Globs for the layers that the model's own class keeps in float32."""
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    return [glob for name in kept for glob in (name, f"*.{name}", f"*.{name}.*")]


def _complete_state(module: QuantizedWeights) -> None:
    """Read the scaling state that disk offload took away; without one, set the weight's scale."""
    if not module.recipe_states and not read_offloaded_state(module):
        module.set_weight_scale()


def _completed(report: ConversionReport, model: Any, config: QuaverConfig) -> ConversionReport:
    """`report` with what is known of the weights now, and without rules that nobody gave."""
    given = config.keep_in_high_precision
    unmatched = tuple(
        rule
        for rule in report.unmatched_rules
        if given != list(DEFAULT_EXCLUDE) and rule.match in map(repr, given)
    )
    layers = []
    for entry in report.converted:
        weight = next(iter(weights_of(model.get_submodule(entry.name)).values()))
        loaded = weight.device.type != "meta"
        layers.append(
            replace(
                entry,
                device=weight.device,
                weights="quantized" if isinstance(weight, QuantizedTensor) else "kept",
                note=entry.note.replace(NO_VALUES_YET, "").strip("; ") if loaded else entry.note,
            )
        )
    return replace(report, converted=tuple(layers), unmatched_rules=unmatched)
