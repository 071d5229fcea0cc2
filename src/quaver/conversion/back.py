"""`convert_back`: a converted model becomes what it was."""

from typing import cast

from torch import nn

from quaver.conversion import parents
from quaver.conversion.attach import detach_region
from quaver.conversion.errors import ConversionError
from quaver.conversion.fusion.modules import Columns
from quaver.conversion.fusion.swap import Fusion, unfuse
from quaver.conversion.places import weights_of
from quaver.conversion.report import AdjustedModule, ConversionReport, ConvertedLayer, class_name
from quaver.conversion.swap import Conversion, conversion_of, swap_out
from quaver.conversion.weights import dequantize_weights
from quaver.nn.weights import QuantizedWeights
from quaver.tensors import QuantizedTensor


def convert_back(model: nn.Module) -> ConversionReport:
    """Undo every `convert` of `model` and of its submodules, in place.

    With weights="keep" everything is again as it was, bit for bit, parameters the same objects.
    Weights that `convert` quantized come back dequantized: FP8's rounding stays in them, and the
    report says so. Fused modules are taken apart. Modules that were made as Quaver's stay Quaver's.

    Returns:
        What was converted back, and which parents were restored.

    Raises:
        ConversionError: `model` is no module, a quantized or fused weight is offloaded, a part of
            a fusion lies outside of `model`, or something else has changed a layer's class since;
            nothing changed.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"model must be an nn.Module, not {type(model).__name__}")
    layers = [
        (name, cast(QuantizedWeights, module), record)
        for name, module in model.named_modules()
        if (record := conversion_of(module)) is not None
    ]
    for name, module, record in layers:
        expected = record.converted
        if expected is not None and type(module) is not expected:
            raise ConversionError(
                f"{name} must still be a {class_name(expected)} to be converted back, but "
                f"its class is {class_name(type(module))} now; undo first what changed it since, "
                f"such as a parametrization"
            )
        weights = weights_of(module).values()
        needed = record.quantized or isinstance(record, Fusion)
        if needed and any(weight.device.type == "meta" for weight in weights):
            kind = "quantized" if record.quantized else "fused"
            raise ConversionError(
                f"converting {name} back needs the values of its {kind} weight, but they are "
                f"offloaded (device meta); call accelerate's remove_hook_from_submodules first"
            )
    _check_fusions(model, [record for _, _, record in layers])
    dequantize_weights(
        module
        for _, module, record in layers
        if record.quantized
        and any(isinstance(weight, QuantizedTensor) for weight in weights_of(module).values())
    )
    converted = tuple(_swap_out(name, module, record) for name, module, record in layers)
    adjusted = []
    for name, module in model.named_modules():
        detach_region(module)
        change = parents.restore(module)
        if change:
            adjusted.append(AdjustedModule(name, class_name(type(module)), change))
    return ConversionReport(converted=converted, adjusted=tuple(adjusted), notes=_notes(layers))


def _check_fusions(model: nn.Module, records: list[Conversion]) -> None:
    """Refuse to convert a part of a model back whose other part holds the weights."""
    whole = {
        member
        for record in records
        if isinstance(record, Fusion)
        for member, _, _ in record.members
    }
    for name, module in model.named_modules():
        if isinstance(module, Columns) and module not in whole:
            raise ConversionError(
                f"{name} is fused with others, in the place of the norm before it, which is no "
                f"part of the module given; call convert_back with the one that holds both"
            )


def _swap_out(name: str, module: QuantizedWeights, record: Conversion) -> ConvertedLayer:
    before = class_name(type(module))
    weight = next(iter(weights_of(module).values()), None)
    notes = ["not the values from before: rounded to FP8"] if record.quantized else []
    if isinstance(record, Fusion):
        notes.append("taken apart")
        unfuse(module)
    else:
        swap_out(module)
    return ConvertedLayer(
        name=name,
        class_before=before,
        class_after=class_name(type(module)),
        device=None if weight is None else weight.device,
        recipe=getattr(module, "recipe", None),
        weights="dequantized" if record.quantized else "kept",
        note="; ".join(notes),
    )


def _notes(layers: list[tuple[str, QuantizedWeights, Conversion]]) -> tuple[str, ...]:
    rounded = sum(record.quantized for _, _, record in layers)
    if not rounded:
        return ()
    return (f"{rounded} weights had been quantized; they came back with FP8's rounding.",)
