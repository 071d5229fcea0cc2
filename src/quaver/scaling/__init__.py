"""Where and when scales are kept, recorded and updated."""

from quaver.scaling.autocast import autocast
from quaver.scaling.calls import (
    Call,
    begin_call,
    close_call_region,
    end_call,
    note_forward,
    open_call_region,
)
from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.regions import backward_passes, current_region
from quaver.scaling.state import RecipeState
from quaver.scaling.stateless import StatelessState

__all__ = [
    "Call",
    "DelayedScalingState",
    "RecipeState",
    "StatelessState",
    "autocast",
    "backward_passes",
    "begin_call",
    "close_call_region",
    "current_region",
    "end_call",
    "note_forward",
    "open_call_region",
]
