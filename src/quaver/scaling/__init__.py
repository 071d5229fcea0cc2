"""Where and when scales are kept, recorded and updated."""

from quaver.scaling.calls import (
    Call,
    begin_call,
    close_call_region,
    end_call,
    note_forward,
    open_call_region,
)
from quaver.scaling.regions import autocast, backward_passes, current_region
from quaver.scaling.state import RecipeState

__all__ = [
    "Call",
    "RecipeState",
    "autocast",
    "backward_passes",
    "begin_call",
    "close_call_region",
    "current_region",
    "end_call",
    "note_forward",
    "open_call_region",
]
