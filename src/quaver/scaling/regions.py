"""Regions: where a recipe is in force, on this thread.

A region is entered by `autocast`, or by a call of a module that has a recipe attached while no
region is active. The outermost active region collects the states that are used inside, and
finalizes them at its exit.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import torch

from quaver.errors import RecipeError
from quaver.recipe import DEFAULT_RECIPE, Recipe
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.finalize import discard, finalize, register_reduced
from quaver.scaling.registry import Key
from quaver.scaling.used import CALIBRATED, RECORDED, Used


class Region:
    """One entered region; `recipe` None means the module's attached one, else the default."""

    def __init__(self, recipe: Recipe | None, enabled: bool, calibrating: bool, group: Any) -> None:
        self.recipe = recipe
        self.enabled = enabled
        self.calibrating = calibrating and not enabled
        self.group = group
        self.records_always = calibrating
        self.parent: Region | None = None
        self.outermost: Region | None = None  # the outermost active region, None: this one
        self.used = Used()
        self.keys: dict[Key, None] = {}
        self.trains = False  # seen: an input that requires grad, under no_grad

    @property
    def active(self) -> bool:
        """Whether modules inside quantize, or record amaxes."""
        return self.enabled or self.calibrating

    def collector(self) -> Region:
        """The region that finalizes what is used inside this one."""
        return self if self.outermost is None else self.outermost


class _Thread(threading.local):
    """Set in __init__, so that torch.compile guards on it and threads stay apart."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.passes = BackwardPasses()


_thread = _Thread()


def current_region() -> Region | None:
    """The innermost region of this thread."""
    return _thread.region


def backward_passes() -> BackwardPasses:
    """Where the backward passes of this thread's forwards note what they use."""
    return _thread.passes


def enter(region: Region) -> None:
    """Make `region` the innermost one of this thread."""
    parent = _thread.region
    region.parent = parent
    collector = parent.collector() if parent is not None else None
    if collector is not None and collector.active:
        region.outermost = collector
    elif region.active:
        _thread.passes.settle()
    _thread.region = region


def leave(region: Region) -> None:
    """Leave `region`, the innermost one; the outermost active one finalizes."""
    _thread.region = region.parent
    if region.active and region.outermost is None:
        try:
            _finish(region)
        finally:
            region.used.clear()


def _finish(region: Region) -> None:
    grad = torch.is_grad_enabled()
    states = region.used.at_least(RECORDED if grad else CALIBRATED)
    if not grad:
        finalized = set(states)
        discard([s for s in region.used.at_least(RECORDED) if s not in finalized])
        if not region.trains:  # else it is the first run of a reentrant checkpoint
            _warn_uncalibrated(region.used)
    if not torch.compiler.is_compiling():
        register_reduced(region.used.states)
    keys = region.keys if grad else ()
    if states or keys:
        finalize(states, len(region.used.devices) == 1, keys)


def _warn_uncalibrated(used: Used) -> None:
    """Inference that goes on without a known scale is said once, naming the modules."""
    if torch.compiler.is_compiling():
        return
    modules = [
        state
        for state, what in used.states.items()
        if state.mode == "forward"
        and what < CALIBRATED
        and not state.warned
        and any(state.cast_unset)
    ]
    if not modules:
        return
    for state in modules:
        state.warned = True
    names = [state.name for state in modules]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    warnings.warn(
        f"delayed scaling has no scales yet in {shown}: each tensor's own amax is used; calibrate "
        "with autocast(enabled=False, calibrating=True) over typical inputs",
        stacklevel=2,
    )


class autocast(ContextDecorator):  # noqa: N801 - the name that users of PyTorch and TransformerEngine know
    """Context manager: Quaver's modules inside compute in FP8. Regions nest; the innermost counts.

    Args:
        enabled: whether modules inside quantize.
        calibrating: with enabled=False: compute in high precision and record amaxes, also under
            no_grad, so that scales are known afterwards.
        recipe: what to quantize with; None: the recipe that `convert` attached to a module, else
            DelayedScaling().
        amax_reduction_group: the process group whose ranks share amaxes; None: the default group.

    Raises:
        RecipeError: `recipe` is not a recipe.

    At the exit of the outermost enabled region, if grad mode is on there, the forward scales are
    updated from the amaxes seen inside; the backward scales at the end of a backward pass. Under
    no_grad nothing is updated. The state is per thread.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(
                f"recipe must be a recipe such as DelayedScaling(), or None, not {recipe!r}"
            )
        self._options = (recipe, enabled, calibrating, amax_reduction_group)

    def __enter__(self) -> None:
        region = Region(*self._options)
        enter(region)
        if region.enabled:
            # Takes part in the reduction even if this rank uses no module inside; the region of a
            # single call names no recipe, and there the states that it uses say their keys.
            key = Key(region.recipe or DEFAULT_RECIPE, region.group, "forward")
            region.collector().keys[key] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        region = _thread.region
        if region is not None:
            leave(region)
