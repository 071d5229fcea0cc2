"""Which states a region, or a backward pass, has used."""

from __future__ import annotations

import torch

from quaver.scaling.delayed import DelayedScalingState

SEEN = 0
"""Used, its amaxes not recorded (no grad mode)."""
RECORDED = 1
"""Amaxes recorded; they are finalized if grad mode is on at the region's exit, else dropped."""
CALIBRATED = 2
"""Amaxes recorded for calibration; they are finalized in any grad mode."""


class Used:
    """States in the order of their first use, what was recorded in each, and their devices.

    The devices are kept beside, so that "all on one device" is known without a walk.
    """

    def __init__(self) -> None:
        self.states: dict[DelayedScalingState, int] = {}
        self.devices: dict[torch.device, None] = {}

    def add(self, state: DelayedScalingState, what: int) -> None:
        """Note a use."""
        known = self.states.get(state, SEEN)
        self.states[state] = known if known > what else what
        self.devices[state.device] = None

    def at_least(self, what: int) -> list[DelayedScalingState]:
        """The states of which at least `what` is noted, in order."""
        return [state for state, known in self.states.items() if known >= what]

    def clear(self) -> None:
        """Forget all."""
        self.states.clear()
        self.devices.clear()
