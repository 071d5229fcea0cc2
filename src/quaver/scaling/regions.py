"""Regions: where a recipe is in force, on this thread.

A region is entered by `autocast`, or by a call of a module that has a recipe attached while no
region is active. The outermost active region collects the states that are used inside, and
finalizes them when it is left.
"""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType
from typing import Any

import torch

from quaver.errors import QuaverError
from quaver.recipe import Recipe
from quaver.scaling.backward import BackwardPasses
from quaver.scaling.finalize import discard, finalize, processes, register_reduced
from quaver.scaling.registry import Key
from quaver.scaling.used import CALIBRATED, RECORDED, Used


class Region:
    """One entered region.

    Attributes:
        recipe: None means the module's attached one.
        by_call: opened by a call of a module: modules without a recipe stay in high precision.
            Otherwise they take the default recipe.
        owner: what entered it.
        frame: of the call that opened it with a hook, which may end without the hook that leaves.
        calls: how many calls of `owner` are under way inside, one in another.
        used: what was used inside, if this is the outermost active region.
        keys: what takes part in reductions though no state of it may be used.
        trains: an input that requires grad was seen under no_grad.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        enabled: bool = True,
        calibrating: bool = False,
        group: Any = None,
        owner: Any = None,
    ) -> None:
        self.recipe = recipe
        self.enabled = enabled
        self.calibrating = calibrating and not enabled
        self.group = group
        self.records_always = calibrating
        self.owner = owner
        self.by_call = False
        self.frame: FrameType | None = None
        self.calls = 1
        self.parent: Region | None = None
        self.used = Used()
        self.keys: dict[Key, None] = {}
        self.trains = False

    @property
    def active(self) -> bool:
        """Whether modules inside quantize, or record amaxes."""
        return self.enabled or self.calibrating

    def collector(self) -> Region:
        """The outermost active region around this one, or this one: what finalizes."""
        outermost, region = self, self.parent
        while region is not None:
            if region.active:
                outermost = region
            region = region.parent
        return outermost


class _Thread(threading.local):
    """Set in __init__, so that torch.compile guards on it and threads stay apart."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.passes = BackwardPasses()


_thread = _Thread()


def current_region() -> Region | None:
    """The innermost region of this thread."""
    if not torch.compiler.is_compiling():
        _leave_interrupted()
    return _thread.region


def _leave_interrupted() -> None:
    """Leave the regions of calls that an interrupt ended.

    A module calls its hooks after an Exception, but not after a KeyboardInterrupt. Such a call is
    known by its frame, which is no longer on the stack.
    """
    region = _thread.region
    while region is not None and region.frame is not None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not region.frame:
            frame = frame.f_back
        if frame is not None:
            return
        leave(region)
        region = _thread.region


def backward_passes() -> BackwardPasses:
    """Where the backward passes of this thread's forwards note what they use."""
    return _thread.passes


def enter(region: Region) -> None:
    """Make `region` the innermost one of this thread."""
    region.parent = current_region()
    if region.active and region.collector() is region:
        _thread.passes.settle()
    _thread.region = region


def entered_by(owner: Any) -> Region:
    """The innermost region of this thread that `owner` entered.

    Raises:
        QuaverError: there is none: it was entered on another thread.
    """
    region = _thread.region
    while region is not None and region.owner is not owner:
        region = region.parent
    if region is None:
        raise QuaverError("an autocast must be left on the thread on which it was entered")
    return region


def leave(region: Region) -> None:
    """Leave `region`, which need not be the innermost; the outermost active one finalizes."""
    finalizes = region.active and region.collector() is region
    inner = _thread.region
    if inner is region:
        _thread.region = region.parent
    else:  # a generator, say, holds a later one open
        while inner is not None and inner.parent is not region:
            inner = inner.parent
        if inner is not None:
            inner.parent = region.parent
    if finalizes:
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
    if not torch.compiler.is_compiling() and processes():
        # What only inference used must not: it may run on one rank alone.
        register_reduced(region.used.states if grad or region.trains else states)
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
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stack level of the user's code, for a warning that the caller gives."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("quaver."):
        level, frame = level + 1, frame.f_back
    return level
