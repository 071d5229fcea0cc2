"""Weights to FP8 and back, tied ones together."""

from collections.abc import Callable, Iterable
from operator import methodcaller

from quaver.conversion.errors import ConversionError
from quaver.conversion.places import weights_of
from quaver.conversion.swap import record_quantized
from quaver.nn.weights import QuantizedWeights


def quantize_weights(layers: dict[str, QuantizedWeights]) -> None:
    """Quantize the weights of `layers`, by name; layers that share one share the FP8 one after.

    Raises:
        ConversionError: one could not be quantized; those before it are dequantized again.
    """
    done: list[QuantizedWeights] = []
    for name, group in _tied(layers):
        try:
            _change_together(group, methodcaller("quantize_weight"))
        except Exception as error:
            dequantize_weights(done)
            rounded = f"; the {len(done)} quantized before it keep FP8's rounding" if done else ""
            raise ConversionError(
                f"{name}.weight could not be quantized ({type(error).__name__}: {error}), so the "
                f"model is not converted{rounded}"
            ) from error
        done.extend(group)
    for module in done:
        record_quantized(module)


def dequantize_weights(layers: Iterable[QuantizedWeights]) -> None:
    """The inverse, but for the rounding."""
    for _, group in _tied({str(i): layer for i, layer in enumerate(layers)}):
        _change_together(group, methodcaller("dequantize_weight"))


def _tied(layers: dict[str, QuantizedWeights]) -> list[tuple[str, list[QuantizedWeights]]]:
    groups: dict[tuple[int, ...], tuple[str, list[QuantizedWeights]]] = {}
    for name, module in layers.items():
        key = tuple(map(id, weights_of(module).values()))
        groups.setdefault(key, (name, []))[1].append(module)
    return list(groups.values())


def _change_together(
    group: list[QuantizedWeights], change: Callable[[QuantizedWeights], None]
) -> None:
    first, *others = group
    change(first)
    for other in others:
        for theirs, mine in zip(other.weight_names, first.weight_names, strict=True):
            other._parameters[theirs] = first._parameters[mine]
