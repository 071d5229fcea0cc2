"""What one forward of a module does: quantize or not, with which recipe, what it records."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from quaver.errors import QuaverError
from quaver.recipe import DEFAULT_RECIPE, Recipe
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.regions import Region, backward_passes, current_region, enter, leave
from quaver.scaling.state import RecipeState, Scales
from quaver.scaling.used import CALIBRATED, RECORDED, SEEN, Used
from quaver.scaling.uses import Use, may_be_repeated


class Call(NamedTuple):
    """How a forward runs.

    Attributes:
        recipe: what it quantizes or calibrates with; None: high precision.
        quantized: whether it quantizes.
        record: what is recorded in the forward state: SEEN (nothing), RECORDED or CALIBRATED.
        group: the process group of the amax reduction.
        again: in a recomputation, the scales that the first run used, if they have changed since.
        outer: in a recomputation: what the backward pass around it has used.
        own_region: the region that this call opened for itself.
        drawn: in a recomputation, the numbers that the first run drew for its random bits, one a
            product; empty where its graph, which is the one that goes on, has them. None: draw.
    """

    recipe: Recipe | None
    quantized: bool = False
    record: int = SEEN
    group: object = None
    again: Scales | None = None
    outer: Used | None = None
    own_region: Region | None = None
    drawn: tuple[torch.Tensor, ...] | None = None


HIGH_PRECISION = Call(None)


def begin_call(attached: Recipe | None, state: RecipeState | None) -> Call:
    """Decide how a forward runs that begins now on this thread.

    Args:
        attached: the module's own recipe.
        state: the module's forward state if it has one.
    """
    if not torch.compiler.is_compiling():
        again = _recomputation(state)
        if again is not None:
            return again
    region = current_region()
    opened = None
    if region is None and attached is not None:
        region = opened = Region(None)
        region.by_call = True
        enter(region)
    if region is None or not region.active:
        return HIGH_PRECISION
    recipe = region.recipe or attached
    if recipe is None:
        if region.by_call:
            return HIGH_PRECISION
        recipe = DEFAULT_RECIPE
    record = RECORDED if torch.is_grad_enabled() else SEEN
    if region.records_always:
        record = CALIBRATED
    return Call(recipe, region.enabled, record, region.group, own_region=opened)


def end_call(call: Call) -> None:
    """Undo what `begin_call` opened."""
    if call.own_region is not None:
        leave(call.own_region)


def open_call_region(module: Any) -> None:
    """Before a call of `module`, whose hook this is: open a region unless one is entered."""
    region = current_region()
    if region is not None:
        if region.by_call and region.owner is module:
            region.calls += 1
        return
    region = Region(None, owner=module)
    region.by_call = True
    if not torch.compiler.is_compiling():
        region.frame = sys._getframe(2)  # of the call itself, whose hook called this
    enter(region)


def close_call_region(module: Any) -> None:
    """After a call of `module`: close the region that its `open_call_region` opened."""
    region = current_region()
    if region is not None and region.by_call and region.owner is module:
        region.calls -= 1
        if region.calls == 0:
            leave(region)


def note_forward(
    call: Call, forward: RecipeState, backward: RecipeState, requires_grad: bool
) -> None:
    """Note the states that a quantized or calibrating forward is about to use.

    Args:
        requires_grad: whether its input requires grad.
    """
    compiling = torch.compiler.is_compiling()
    if call.outer is not None:
        if call.record and isinstance(forward, DelayedScalingState):
            call.outer.add(forward, call.record)
        return
    region = current_region()
    if region is None:
        raise QuaverError("a forward outside of any region cannot use scaling states")
    collector = region.collector()
    used = collector.used
    if not torch.is_grad_enabled():
        collector.trains |= requires_grad
    if isinstance(forward, DelayedScalingState):
        used.add(forward, call.record)
    if call.quantized and torch.is_grad_enabled() and isinstance(backward, DelayedScalingState):
        used.add(backward, SEEN)
        if compiling:  # a compiled backward cannot say so itself
            backward_passes().compiled.add(backward, RECORDED)
    if not compiling and may_be_repeated(grad := torch.is_grad_enabled()):
        recipe = call.recipe if call.quantized else None
        forward.keep_scales()
        recorded, passes = call.record != SEEN, backward_passes()
        forward.uses.note(Use(recipe, call.group, forward.updates, recorded, grad, passes))
        # Gradients are wanted, but not here: the first run of a reentrant checkpoint.
        if call.quantized and collector.trains and not grad:
            forward.uses.reserve(backward.draws())


def note_high_precision(forward: RecipeState) -> None:
    """Note a forward without quantization of a module that has states."""
    if torch._C._current_graph_task_id() == -1:  # else it is a recomputation of one
        grad = torch.is_grad_enabled()
        if may_be_repeated(grad):
            forward.uses.note(Use(None, None, forward.updates, recorded=False, grad=grad))


def _recomputation(state: RecipeState | None) -> Call | None:
    """A forward inside a backward pass recomputes an earlier one: same recipe, same scales."""
    if state is None or torch._C._current_graph_task_id() == -1:
        return None
    use = state.uses.recomputed()
    if use is None:
        return None
    if use.recipe is None:
        return HIGH_PRECISION
    record = SEEN if use.recorded else RECORDED
    scales = state.scales_at(use.updates)
    outer = use.passes.join()  # of the first run's thread: devices' own threads share it
    drawn = () if use.grad else state.uses.reserved()
    return Call(use.recipe, True, record, use.group, again=scales, outer=outer, drawn=drawn)
