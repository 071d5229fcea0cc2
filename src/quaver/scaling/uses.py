"""The forwards in which a state was used, so that a recomputation can repeat the right one.

torch.utils.checkpoint runs a forward again inside a backward pass, by which time scales have been
updated. Which forward it repeats is told by autograd's sequence numbers: a thread's counter, of
which every node of its graph takes the next. The node that runs when a forward is recomputed is
younger than that forward's first run, but for the node of a reentrant checkpoint, which takes its
number just before.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from quaver.errors import QuaverError
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
        first: autograd's sequence number at the first of them.
    """

    recipe: Recipe | None
    group: Any
    updates: int
    recorded: bool
    first: int = 0

    def is_like(self, other: Use) -> bool:
        """Whether the two differ in nothing that a recomputation must repeat."""
        return (
            self.recipe is other.recipe
            and self.updates == other.updates
            and self.recorded == other.recorded
            and self.group is other.group
        )


class Uses:
    """The last uses of one state, the newest at the end."""

    def __init__(self) -> None:
        self._thread = 0  # whose numbers they are
        self._uses: deque[Use] = deque(maxlen=KEPT)

    def note(self, use: Use) -> None:
        """Note a forward that begins now."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._uses.clear()
        newest = self._uses[-1] if self._uses else None
        if newest is None or not newest.is_like(use):
            use.first = torch._C._autograd._get_sequence_nr()
            self._uses.append(use)

    def recomputed(self) -> Use | None:
        """The use that a forward repeats which runs inside a backward pass.

        None if the state was never used before: then it is no recomputation.

        Raises:
            QuaverError: it cannot be told which.
        """
        if not self._uses:
            return None
        node = torch._C._current_autograd_node()
        if node is None:
            return self._uses[-1]
        reentrant = type(node).__name__ == "CheckpointFunctionBackward"
        _refuse_nested(reentrant)
        number = node._sequence_nr() + int(reentrant)
        use = next((use for use in reversed(self._uses) if use.first <= number), None)
        if use is None:
            raise QuaverError(
                "a recomputed forward cannot be matched with its first run, of which the last "
                f"{KEPT} are remembered; run its backward earlier"
            )
        return use


def _refuse_nested(reentrant: bool) -> None:
    """Raise in a checkpoint inside a checkpoint, unless both are non-reentrant.

    The graph that a reentrant one rebuilds has the numbers of autograd's thread, which cannot be
    told from those of the first run.
    """
    inner_reentrant = not torch.is_grad_enabled()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if reentrant else None
    inner_other = hooks is not None and "_checkpoint_hook" in hooks[0].__qualname__
    if inner_reentrant or inner_other:
        raise QuaverError(
            "a checkpoint inside a reentrant checkpoint, or a reentrant one inside another, cannot "
            "repeat its scales; pass use_reentrant=False to torch.utils.checkpoint in both"
        )
