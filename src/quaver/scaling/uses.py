"""The forwards in which a state was used, so that a recomputation can repeat the right one.

torch.utils.checkpoint runs a forward again inside a backward pass, by which time scales have been
updated. Which forward it repeats is told by the checkpoint itself, where the first run has seen it;
else by autograd's sequence numbers: a thread's counter, of which every node of its graph takes the
next. The node of a Function that recomputes, such as a reentrant checkpoint, takes its number just
before the first run. The node that runs when another forward is recomputed, by torch's
non-reentrant checkpoint or by a tensor's hook, is younger than the first run.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import BackwardCFunction

from quaver.errors import QuaverError
from quaver.recipe import Recipe

KEPT = 32
"""How many updates, and uses of different kinds, are remembered."""

KEPT_DRAWS = 256
"""Of how many forwards the numbers for random bits are remembered; older ones draw anew."""


@dataclass(slots=True)
class Use:
    """Forwards in a row that used a state alike.

    Attributes:
        recipe: what they quantized with; None: high precision.
        group: of the amax reduction.
        updates: how many updates the state had seen.
        recorded: whether amaxes were recorded.
        grad: whether grad mode was on.
        passes: the backward passes of the thread that they were on.
        first, last: autograd's sequence numbers at the first and the last of them.
    """

    recipe: Recipe | None
    group: Any
    updates: int
    recorded: bool
    grad: bool
    passes: Any = None
    first: int = 0
    last: int = 0

    def is_like(self, other: Use) -> bool:
        """Whether the two differ in nothing that a recomputation must repeat."""
        return (
            self.recipe is other.recipe
            and self.updates == other.updates
            and self.recorded == other.recorded
            and self.grad == other.grad
            and self.group is other.group
        )


class Reserved(NamedTuple):
    """What a forward without grad mode drew, in case that it is a reentrant checkpoint's first run.

    Attributes:
        first: autograd's sequence number at the time.
        numbers: one a product.
    """

    first: int
    numbers: tuple[torch.Tensor, ...]


class _Here(threading.local):
    """Per thread: what stands for it. A thread's number is given to a later thread again."""

    class Thread:
        """Dies with its thread."""

    def __init__(self) -> None:
        self.thread = _Here.Thread()


_here = _Here()


class Uses:
    """The last uses of one state by thread, the newest at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: WeakKeyDictionary[_Here.Thread, deque[Use]] = WeakKeyDictionary()
        self._checkpoints: WeakKeyDictionary[Any, Use] = WeakKeyDictionary()
        self._reserved: deque[Reserved] = deque(maxlen=KEPT_DRAWS)
        self._turn: tuple[tuple[int, int], int] = ((0, 0), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Uses, ()  # they belong to this process and its graphs

    def note(self, use: Use) -> None:
        """Note a forward that begins now and may be repeated (see `may_be_repeated`)."""
        uses = self._threads.get(_here.thread)
        if uses is None:
            with self._lock:
                uses = self._threads[_here.thread] = deque(maxlen=KEPT)
        now = torch._C._autograd._get_sequence_nr()
        newest = uses[-1] if uses else None
        if newest is None or not newest.is_like(use):
            use.first = now
            uses.append(use)
            newest = use
        newest.last = now
        self._note_checkpoint(newest)

    def _note_checkpoint(self, use: Use) -> None:
        checkpoint = _checkpoint_around()
        if checkpoint is not None:
            self._checkpoints.setdefault(checkpoint, use)

    def reserve(self, numbers: tuple[torch.Tensor, ...]) -> None:
        """Remember what a forward that begins now, without grad mode, drew for random bits."""
        if numbers:
            first = torch._C._autograd._get_sequence_nr()
            self._reserved.append(Reserved(first, numbers))

    def reserved(self) -> tuple[torch.Tensor, ...] | None:
        """What the first run drew of a forward that a reentrant checkpoint repeats now.

        The forwards of a checkpoint are repeated in turn. None if it is not remembered.
        """
        node = torch._C._current_autograd_node()
        if not self._reserved or node is None:
            return None
        first = node._sequence_nr() + 1
        recomputation = (torch._C._current_graph_task_id(), first)
        turn = self._turn[1] + 1 if self._turn[0] == recomputation else 0
        self._turn = (recomputation, turn)
        if len(self._reserved) == KEPT_DRAWS and self._reserved[0].first >= first:
            return None  # it may be among those that are forgotten
        drawn = [each.numbers for each in self._reserved if each.first >= first]
        return drawn[turn] if turn < len(drawn) else None

    def recomputed(self) -> Use | None:
        """The use that a forward repeats which runs inside a backward pass.

        None if it is no recomputation: the state was never used before, or a hook calls the module.

        Raises:
            QuaverError: it cannot be told which.
        """
        node = torch._C._current_autograd_node()
        if not self._threads or node is None:
            return None
        by, checkpoint = _recomputes(node)
        if by is None:
            return None
        use = None if checkpoint is None else self._checkpoints.get(checkpoint)
        if use is None:
            use = self._by_number(by, node._sequence_nr())
        self._note_checkpoint(use)  # one inside, which may be repeated in its turn
        return use

    def _by_number(self, by: str, number: int) -> Use:
        find = _FINDERS[by]
        with self._lock:
            threads = list(self._threads.values())
        found = [use for uses in threads if (use := find(uses, number)) is not None]
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


def _first_after(uses: deque[Use], number: int) -> Use | None:
    """Of a Function that recomputes, whose first run is without grad mode.

    Other Functions inside, before the module, take numbers in between.
    """
    if len(uses) == KEPT and uses[0].first > number:
        return None  # it may be among those that are forgotten
    return next((use for use in uses if not use.grad and use.last > number), None)


def _last_before(uses: deque[Use], number: int, grad: bool) -> Use | None:
    return next((use for use in reversed(uses) if use.grad == grad and use.first <= number), None)


Finder = Callable[[deque[Use], int], Use | None]

_FINDERS: dict[str, Finder] = {
    "function": _first_after,
    "checkpoint": lambda uses, number: _last_before(uses, number, grad=True),
    "hook": lambda uses, number: _last_before(uses, number, grad=False),
}
"""How the use is found that a forward repeats, from autograd's number of the running node."""


def _recomputes(node: torch.autograd.graph.Node) -> tuple[str | None, Any]:
    """What recomputes while `node` runs: a "function", a non-reentrant "checkpoint", or a "hook".

    None where a forward inside a backward repeats none, but comes from a hook, or from a Function
    of the user's that calls a module without grad mode. And torch's record of the checkpoint.

    Raises:
        QuaverError: in a checkpoint inside a checkpoint, unless both are non-reentrant: the graph
            that a reentrant one rebuilds has the numbers of autograd's thread, which cannot be told
            from those of the first run.
    """
    by, checkpoint = _caller(sys._getframe(1))
    grad = torch.is_grad_enabled()
    nested = by == "checkpoint" and not grad
    if by == "function":
        nested = _checkpoint_around() is not None or (not grad and _is_checkpoint(node))
    if nested:
        raise QuaverError(
            "a checkpoint inside a reentrant checkpoint, or a reentrant one inside another, cannot "
            "repeat its scales; pass use_reentrant=False to torch.utils.checkpoint in both"
        )
    return by if grad else None, checkpoint


_FUNCTION = {
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def _caller(frame: FrameType | None) -> tuple[str, Any]:
    """What of autograd has called the code that runs in `frame`, and torch's record of it."""
    while frame is not None and frame.f_code is not _ENGINE:
        code = frame.f_code
        if code in _FUNCTION:
            return "function", None
        if code.co_name == "unpack_hook" and "_checkpoint_hook" in code.co_qualname:
            return "checkpoint", frame.f_locals.get("frame")
        frame = frame.f_back
    return "hook", None


def _checkpoint_around() -> Any:
    """torch's record of the innermost non-reentrant checkpoint whose first run goes on, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
    if "_checkpoint_hook" not in getattr(pack, "__qualname__", ""):
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))
    return cells["frame"].cell_contents if "frame" in cells else None


def _is_checkpoint(node: torch.autograd.graph.Node) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"
