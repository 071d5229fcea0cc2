"""The hooks on a converted model that make each call of it a region, without any `autocast`."""

from collections import OrderedDict
from typing import Any, cast

from torch import nn

from quaver.scaling import close_call_region, open_call_region

# Handles count up from 0 in each process, and so would sooner or later give an unpickled model's
# hook ids to other hooks, which replace it. A negative id is nobody else's, and ours stay single.
_HOOK_ID = -8


def open_region(module: nn.Module, args: Any) -> None:
    """Forward-pre hook: opens the region of a call, unless the thread is in one."""
    open_call_region(module)


def close_region(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, called also after an error: closes and finalizes what `open_region` opened."""
    close_call_region(module)


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
