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
from torch.autograd.function import BackwardCFunction

from quaver.errors import QuaverError
from quaver.recipe import Recipe

KEPT = 32
"""How many updates, and uses of different kinds, are remembered."""


@dataclass(slots=True)
class Use:
    """Forwards in a row that used a state alike.

    Attributes:
        recipe: what they quantized with; None: high precision.
        group: of the amax reduction.
        updates: how many updates the state had seen.
        recorded: whether amaxes were recorded.
        grad: whether grad mode was on.
        first: autograd's sequence number at the first of them.
    """

    recipe: Recipe | None
    group: Any
    updates: int
    recorded: bool
    grad: bool
    first: int = 0

    def is_like(self, other: Use) -> bool:
        """Whether the two differ in nothing that a recomputation must repeat."""
        return (
            self.recipe is other.recipe
            and self.updates == other.updates
            and self.recorded == other.recorded
            and self.grad == other.grad
            and self.group is other.group
        )


class Uses:
    """The last uses of one state by thread, the newest at the end."""

    def __init__(self) -> None:
        self._threads: dict[int, deque[Use]] = {}

    def note(self, use: Use) -> None:
        """Note a forward that begins now and may be repeated (see `may_be_repeated`)."""
        thread = threading.get_ident()
        uses = self._threads.get(thread)
        if uses is None:
            while len(self._threads) >= KEPT:  # threads come and go
                del self._threads[next(iter(self._threads))]
            uses = self._threads[thread] = deque(maxlen=KEPT)
        newest = uses[-1] if uses else None
        if newest is None or not newest.is_like(use):
            use.first = torch._C._autograd._get_sequence_nr()
            uses.append(use)

    def recomputed(self) -> Use | None:
        """The use that a forward repeats which runs inside a backward pass.

        None if it is no recomputation: the state was never used before, or a hook calls the module.

        Raises:
            QuaverError: it cannot be told which.
        """
        node = torch._C._current_autograd_node()
        if not self._threads or node is None:
            return None
        kind = _kind(node)
        if kind is None:
            return None
        reentrant = kind == "reentrant"
        number = node._sequence_nr() + int(reentrant)
        alive = {thread.ident for thread in threading.enumerate()}
        self._threads = {t: uses for t, uses in self._threads.items() if t in alive}
        # The first run of a reentrant checkpoint is under no_grad, that of another is not.
        found = [
            use
            for uses in self._threads.values()
            if (use := _newest(uses, number, grad=not reentrant)) is not None
        ]
        if not found or any(not use.is_like(found[0]) for use in found):
            raise QuaverError(
                "a recomputed forward cannot be matched with its first run, of which the last "
                f"{KEPT} are remembered; run its backward earlier, and use a module under "
                "checkpointing on one thread only"
            )
        return found[0]


def may_be_repeated(grad: bool) -> bool:
    """Whether a forward that begins now may run again inside a backward pass.

    Then its first run is without grad mode, or somebody watches what autograd saves: else the graph
    would be there already.
    """
    return not grad or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _newest(uses: deque[Use], number: int, grad: bool) -> Use | None:
    return next((u for u in reversed(uses) if u.first <= number and u.grad == grad), None)


def _kind(node: torch.autograd.graph.Node) -> str | None:
    """The kind of checkpoint that recomputes while `node` runs: "reentrant" or "other".

    None where a forward inside a backward repeats none, but comes from a hook, or from a Function
    of the user's that calls a module without grad mode.

    Raises:
        QuaverError: in a checkpoint inside a checkpoint, unless both are non-reentrant: the graph
            that a reentrant one rebuilds has the numbers of autograd's thread, which cannot be told
            from those of the first run.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    grad = torch.is_grad_enabled()
    other = "_recomputation_hook" in name
    other |= "_checkpoint_hook" in name and not _is_checkpoint(node)
    # A reentrant checkpoint is a Function whose backward runs the forward again, of whatever name.
    reentrant = not other and isinstance(node, BackwardCFunction)
    nested = (reentrant and ("_checkpoint_hook" in name or not grad) and _is_checkpoint(node)) or (
        other and not grad
    )
    if nested:
        raise QuaverError(
            "a checkpoint inside a reentrant checkpoint, or a reentrant one inside another, cannot "
            "repeat its scales; pass use_reentrant=False to torch.utils.checkpoint in both"
        )
    if not grad:
        return None
    return "reentrant" if reentrant else "other"


def _is_checkpoint(node: torch.autograd.graph.Node) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"
