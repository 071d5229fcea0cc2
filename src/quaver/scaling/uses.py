"""The forwards in which a state was used, so that a recomputation can repeat the right one.

torch.utils.checkpoint runs a forward again inside a backward pass, by which time scales have been
updated. Which forward it repeats is told by autograd's sequence numbers: a thread's counter, of
which every node of its graph takes the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from quaver.recipe import Recipe

KEPT = 16
"""How many updates, and uses of different kinds, are remembered."""


@dataclass(slots=True)
class Use:
    """Forwards in a row that used a state alike.

    Attributes:
        recipe: what they quantized with; None: high precision.
        group: of the amax reduction.
        updates: how many updates the state had seen.
        recorded: whether amaxes were recorded.
        first, last: autograd's sequence number at the first and the last of them.
    """

    recipe: Recipe | None
    group: Any
    updates: int
    recorded: bool
    first: int
    last: int

    def is_like(self, recipe: Recipe | None, group: Any, updates: int, recorded: bool) -> bool:
        """Whether a further forward belongs to this use."""
        return (
            self.recipe is recipe
            and self.updates == updates
            and self.recorded == recorded
            and self.group is group
        )


class Uses:
    """The last uses of one state, the newest at the end."""

    def __init__(self) -> None:
        self._uses: deque[Use] = deque(maxlen=KEPT)

    def note(self, recipe: Recipe | None, group: Any, updates: int, recorded: bool) -> None:
        """Note a forward that begins now."""
        number: int = torch._C._autograd._get_sequence_nr()
        newest = self._uses[-1] if self._uses else None
        if newest is not None and newest.is_like(recipe, group, updates, recorded):
            newest.last = number
        else:
            self._uses.append(Use(recipe, group, updates, recorded, number, number))

    def recomputed(self) -> Use | None:
        """The use that a forward repeats which runs inside a backward pass; None if unknown.

        A non-reentrant checkpoint recomputes at the first node of its part that runs, which is
        younger than the forward. A reentrant one has a node of its own, which is older, and its
        first run was under no_grad.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return self._uses[-1] if self._uses else None
        number = node._sequence_nr()
        if type(node).__name__ == "CheckpointFunctionBackward":
            return next((use for use in self._uses if use.last > number), None)
        return next((use for use in reversed(self._uses) if use.first <= number), None)
