"""TransformerEngine's `_extra_state`, as scaling states: its pickles, and nothing executed.

A state is a dict {recipe, scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd,
extra_fp8_variables}, pickled into a uint8 tensor (2.x), or written by `torch.save` into an
io.BytesIO (1.x, without the recipe). The slots of a GEMM (input, weight, output; grad_output,
grad_input) and the order of a history are the same there and here.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch

from quaver import recipe as recipes
from quaver.errors import CheckpointError, RecipeError
from quaver.recipe import DelayedScaling, Format, Recipe
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.pickles import Record, is_pickle, read

_MODULE = "transformer_engine.common.recipe"
_RECIPES: dict[str, type[Recipe]] = {
    kind.__name__: kind
    for kind in (
        recipes.DelayedScaling,
        recipes.Float8CurrentScaling,
        recipes.Float8BlockScaling,
        recipes.MXFP8BlockScaling,
        recipes.NVFP4BlockScaling,
    )
}
_OTHERS = ("Format", "_FormatHelper", "MMParams", "QParams", "_OverrideLinearPrecision")
_ADMITTED = frozenset(f"{_MODULE}.{name}" for name in (*_RECIPES, *_OTHERS))
_FORMATS = {(448, 448): Format.E4M3, (448, 57344): Format.HYBRID}
"""By the largest values, forward and backward."""

_SUFFIXES = {"forward": "fwd", "backward": "bwd"}
_OPERANDS = {"forward": 3, "backward": 2}  # a GEMM's
# FP8 attention is no part of a linear's state, and what it says is not known here.
_NOT_OURS = ("fp8_dpa", "fp8_mha", "interval", "override_linear_precision")


def te_bytes(state: Any) -> bytes | None:
    """The bytes of a state that may be TransformerEngine's; None: it is none."""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, bytes | bytearray):
        return bytes(state)
    if isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1:
        head = bytes(state[:4].tolist())
        if head and is_pickle(head):
            return state.detach().cpu().contiguous().numpy().tobytes()
    return None


def te_content(data: bytes) -> dict[Any, Any] | None:
    """What the pickle of a state holds; None: there was no state.

    Raises:
        CheckpointError: it holds what is not admitted, or is no dict.
    """
    content = read(data, _ADMITTED)
    if not isinstance(content, dict | None):
        raise CheckpointError(
            f"TransformerEngine's extra state must hold a dict, not {type(content).__name__}"
        )
    return content


def te_states(
    data: bytes, sizes: Mapping[str, int], recipe: DelayedScaling | None
) -> dict[str, DelayedScalingState]:
    """The states that TransformerEngine wrote, on the CPU; empty if there were none.

    Args:
        data: what `te_bytes` gave.
        sizes: the module's slots by direction.
        recipe: what the states shall follow: a history of another length keeps its newest
            entries; None: the recipe that they were saved with.

    Raises:
        CheckpointError: the pickle holds what is not admitted, or not what a state holds.
    """
    content = te_content(data)
    if content is None:
        return {}
    saved = te_recipe(content.get("recipe"))
    if not isinstance(saved, DelayedScaling | None):
        return {}  # nothing is remembered under the others
    states = {mode: _state(content, mode, n, saved) for mode, n in sizes.items()}
    for state in states.values():
        if recipe is not None:
            state.follow(recipe)
    return states


def te_recipe(record: Any) -> Recipe | None:
    """Our recipe of the same name and fields; None for a state that has none.

    Raises:
        CheckpointError: it is not one of TransformerEngine's recipes, or a field is out of range.
    """
    if record is None:
        return None
    kind = _RECIPES.get(type(record).__name__) if isinstance(record, Record) else None
    if kind is None:
        raise CheckpointError(
            f"the recipe in TransformerEngine's extra state must be one of {', '.join(_RECIPES)}"
        )
    known = {field.name for field in dataclasses.fields(kind)} - set(_NOT_OURS)  # type: ignore[arg-type]
    values = {name: value for name, value in vars(record).items() if name in known}
    if "fp8_format" in values:
        values["fp8_format"] = _format(values["fp8_format"])
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str | Format | None):
            raise CheckpointError(
                f"the recipe in TransformerEngine's extra state has a {name} of its own, which no "
                "checkpoint can bring; save it with a recipe without functions"
            )
    try:
        return kind(**values)
    except (RecipeError, TypeError) as error:
        raise CheckpointError(f"the recipe in TransformerEngine's extra state: {error}") from None


def _format(record: Any) -> Format:
    helper = record.record_args[0] if isinstance(record, Record) and record.record_args else None
    found = _FORMATS.get(helper.record_args) if isinstance(helper, Record) else None
    if found is None:
        raise CheckpointError(
            "the recipe in TransformerEngine's extra state must have the format E4M3 or HYBRID"
        )
    return found


def _state(
    content: dict[Any, Any], mode: str, slots: int, saved: DelayedScaling | None
) -> DelayedScalingState:
    scale = _tensor(content, f"scale_{_SUFFIXES[mode]}", 1, slots)
    history = _tensor(content, f"amax_history_{_SUFFIXES[mode]}", 2, slots)
    if not (torch.isfinite(scale).all() and (scale > 0).all()):
        raise CheckpointError(
            f"scales must be finite and positive, not {scale[:8].tolist()} (direction {mode})"
        )
    if history.shape[0] < 1 or torch.isnan(history).any() or (history < 0).any():
        raise CheckpointError("an amax history must hold entries, no NaN and nothing negative")
    follow = dataclasses.replace(saved or DelayedScaling(), amax_history_len=history.shape[0])
    state = DelayedScalingState(follow, mode, slots, torch.device("cpu"))
    known = (scale != 1.0) | (history > 0).any(0)  # 1 is where TransformerEngine begins
    order = _order(known.tolist(), _OPERANDS[mode])
    scale, history, known = scale[order], history[:, order], known[order]
    state.scale.copy_(scale)
    state.ready.copy_(known)
    state.amax_history.copy_(history)
    state.unset = (~known).tolist()
    return state


def _order(known: list[bool], operands: int) -> list[int]:
    """Where each of our slots, GEMM by GEMM, is in a state.

    GroupedLinear kept its slots operand by operand until some version of 2.x. What tells is the
    last operand, which has a slot and is never quantized.
    """
    slots = len(known)
    gemms = slots // operands
    used = [i for i, is_known in enumerate(known) if is_known]
    by_gemm = all(i % operands < operands - 1 for i in used)
    by_operand = all(i < gemms * (operands - 1) for i in used)
    if by_gemm or not by_operand:
        return list(range(slots))
    return [operand * gemms + gemm for gemm in range(gemms) for operand in range(operands)]


def _tensor(content: dict[Any, Any], name: str, dims: int, slots: int) -> torch.Tensor:
    tensor = content.get(name)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"TransformerEngine's extra state must hold a tensor {name}")
    if tensor.dtype != torch.float32 or tensor.dim() != dims or tensor.shape[-1] != slots:
        expected = f"float32 [{'L, ' if dims == 2 else ''}{slots}]"
        raise CheckpointError(
            f"{name} in TransformerEngine's extra state must be {expected} for this module, not "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor
