"""Quantized tensors as plain ones with names, for safetensors, and back.

    weight                  the payload of the row-wise copy; FP8, or two FP4 values a byte
    weight_scale_inv        its scales
    weight_global_scale_inv, weight_columnwise, weight_columnwise_scale_inv, ...    other parts

What a tensor is besides stands in the file's metadata, as JSON under the key "quaver". A weight in
blocks of 128×128 has the names of transformers' finegrained FP8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from quaver import tensors as classes
from quaver.errors import CheckpointError
from quaver.tensors import QuantizedTensor
from quaver.tensors.frame import Frame

METADATA_KEY = "quaver"
_KINDS: dict[str, type[QuantizedTensor]] = {
    kind.__name__: kind
    for kind in (
        classes.Float8Tensor,
        classes.Float8BlockwiseTensor,
        classes.MXFP8Tensor,
        classes.NVFP4Tensor,
    )
}

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PAYLOADS = dict.fromkeys(_KINDS.values(), _FP8) | {classes.NVFP4Tensor: (torch.uint8,)}


def flatten_state(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A state dict as plain tensors, contiguous and on the CPU, and metadata for safetensors.

    Args:
        state: what `model.state_dict()` gave. Tied tensors are kept once.

    Raises:
        CheckpointError: an entry is no tensor, has no values (device meta), is a shard, or its
            name clashes.
    """
    flat: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    tied: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} must be a tensor to be saved with safetensors, not {type(value).__name__}"
            )
        if value.device.type == "meta":
            raise CheckpointError(f"{name} has no values (device meta); load or materialize it")
        if hasattr(value, "full_tensor"):
            raise CheckpointError(
                f"{name} is a shard of this rank; use torch.distributed.checkpoint, or gather "
                "the state dict with full_tensor() first"
            )
        first = seen.setdefault(_identity(value), name)
        if first != name:
            tied[name] = first
            continue
        parts = {"": value}
        if isinstance(value, QuantizedTensor):
            parts = {_suffix(part): tensor for part, tensor in value.parts().items()}
            described[name] = _description(value)
        for suffix, part in parts.items():
            if f"{name}{suffix}" in flat:
                raise CheckpointError(f"two tensors would be called {name}{suffix}")
            flat[f"{name}{suffix}"] = part.detach().cpu().contiguous()
    if not (described or tied):
        return flat, {}
    return flat, {METADATA_KEY: json.dumps({"quantized": described, "tied": tied})}


def unflatten_state(
    flat: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """The state dict that `flatten_state` took apart, its tensors on their present devices.

    Raises:
        CheckpointError: parts are missing or do not fit the metadata.
    """
    rest = dict(flat)
    state: dict[str, torch.Tensor] = {}
    about = _about(metadata or {})
    for name, description in about["quantized"].items():
        state[name] = _rebuilt(name, description, rest)
    state |= rest
    for name, first in about["tied"].items():
        if first not in state:
            raise CheckpointError(f"{name} is tied to {first}, which is not there")
        state[name] = state[first]
    return state


def _identity(value: torch.Tensor) -> Any:
    """Equal for two entries that are one tensor."""
    if isinstance(value, QuantizedTensor):
        return tuple(_identity(part) for part in value.parts().values())
    if value.numel() == 0:
        return id(value)
    return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)


def _suffix(part: str) -> str:
    """A part's name behind the parameter's: "rowwise_data" is the parameter itself."""
    usage, _, what = part.partition("_")
    pieces = ([] if usage == "rowwise" else [usage]) + ([] if what == "data" else [what])
    return "".join(f"_{piece}" for piece in pieces)


def _description(value: QuantizedTensor) -> dict[str, Any]:
    frame = value.frame()
    return {
        "class": type(value).__name__,
        "parts": list(value.parts()),
        "shape": list(frame.shape),
        "dtype": str(frame.dtype).removeprefix("torch."),
        "layout": frame.layout,
        "hadamard": frame.hadamard,
        "matrix": frame.matrix,
    }


def _about(metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {"quantized": {}, "tied": {}}
    try:
        about = json.loads(text)
        return {"quantized": dict(about["quantized"]), "tied": dict(about["tied"])}
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"the metadata {METADATA_KEY!r} is damaged") from None


def _rebuilt(name: str, about: Any, rest: dict[str, torch.Tensor]) -> QuantizedTensor:
    """The quantized tensor `name`; its parts are taken out of `rest`."""
    try:
        kind = _KINDS[about["class"]]
        dtype = getattr(torch, about["dtype"])
        matrix = None if about["matrix"] is None else tuple(about["matrix"])
        shape = torch.Size(about["shape"])
        frame = Frame(shape, dtype, about["layout"], None, about["hadamard"], matrix)
        parts = {part: rest.pop(f"{name}{_suffix(part)}") for part in about["parts"]}
        if set(parts) - set(kind.part_names) or not isinstance(dtype, torch.dtype):
            raise KeyError(name)
        tensor = kind.build(parts, frame)
        kind.check_quantized(tensor.operands())
        _check_parts(tensor)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the quantized {name} has parts that are missing or do not fit its description "
            f"({type(error).__name__}: {str(error)[:80]})"
        ) from None
    return tensor


def _check_parts(tensor: QuantizedTensor) -> None:
    """Raise ValueError unless the parts have the shapes, dtypes and values that they can have."""
    rows, width = tensor.rows_and_width()
    if math.prod(tensor.shape) != rows * width:
        raise ValueError("shape and matrix differ")
    row, col = tensor.operands()
    padded = -(-rows // 16) * 16 if tensor.hadamard else rows
    for operand, height, length in ((row, rows, width), (col, width, padded)):
        if operand is None:
            continue
        data, scale = _shapes(tensor, height, length)
        if tuple(operand.data.shape) != data or operand.data.dtype not in _PAYLOADS[type(tensor)]:
            raise ValueError(f"a payload must be of shape {data}")
        scales = (operand.scale_inv, scale), (operand.global_scale_inv, (1,))
        for part, shape in scales:
            if part is None:
                continue
            values = part.to(torch.float32)
            if tuple(part.shape) != shape or not (values.isfinite() & (values >= 0)).all():
                raise ValueError(f"scales must be of shape {shape}, finite and not negative")


def _shapes(
    tensor: QuantizedTensor, height: int, length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the payload and the scales of an operand [height, length]."""
    if not isinstance(tensor, classes.BlockTensor):
        return (height, length), (1,)
    side, packed = tensor.side, tensor.values_per_byte
    below = side if tensor.two_dimensional else 1
    return (height, -(-length // packed)), (-(-height // below), -(-length // side))
