"""The hooks on a converted model that make each call of it a region, without any `autocast`."""

import sys
import threading
from collections import OrderedDict
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from quaver.scaling import close_call_region, open_call_region
from quaver.scaling.regions import Region

# Handles count up from 0 in each process, and so would sooner or later give an unpickled model's
# hook ids to other hooks, which replace it. A negative id is nobody else's, and ours stay single.
_HOOK_ID = -8


class _OpenCall(NamedTuple):
    """A call in progress of a model that has the hooks.

    Attributes:
        region: what it opened; None if the thread was in a region already.
        frame: the one that called its hooks; None under torch.compile.
    """

    module: nn.Module
    region: Region | None
    frame: FrameType | None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_OpenCall] = []


_thread = _Thread()


def open_region(module: nn.Module, args: Any) -> None:
    """Forward-pre hook: opens the region of a call, unless the thread is in one."""
    frame = None
    if not torch.compiler.is_compiling():
        frame = sys._getframe(1)
        _abandon_interrupted(frame)
    _thread.calls.append(_OpenCall(module, open_call_region(), frame))


def close_region(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, called also after an error: closes and finalizes what `open_region` opened."""
    calls = _thread.calls
    if calls and calls[-1].module is module:  # else an earlier hook raised, and none was opened
        close_call_region(calls.pop().region)


def _abandon_interrupted(frame: FrameType) -> None:
    """Leave the regions of calls that an interrupt ended.

    A module calls its hooks after an Exception, but not after a KeyboardInterrupt. Such a call is
    known by its frame, which is no longer on the stack; its region would swallow all later ones.
    """
    calls = _thread.calls
    if not calls:
        return
    running = set()
    above: FrameType | None = frame.f_back
    while above is not None:
        running.add(id(above))
        above = above.f_back
    while calls and calls[-1].frame is not None and id(calls[-1].frame) not in running:
        close_call_region(calls.pop().region)


def attach_region(model: nn.Module) -> None:
    """Make each call of `model` a region; a model that has the hooks keeps one pair of them.

    Hooks are module-level functions, so that they survive deepcopy and pickle.
    """
    model._forward_pre_hooks[_HOOK_ID] = open_region
    model._forward_hooks[_HOOK_ID] = close_region
    model._forward_hooks_always_called[_HOOK_ID] = True
    # First, so that hooks of the user which call converted layers run inside the region.
    cast(OrderedDict[int, Any], model._forward_pre_hooks).move_to_end(_HOOK_ID, last=False)


def detach_region(model: nn.Module) -> None:
    """Take the hooks off again, if there are any."""
    for hooks in (
        model._forward_pre_hooks,
        model._forward_hooks,
        model._forward_hooks_always_called,
    ):
        hooks.pop(_HOOK_ID, None)
