"""When backward scales are finalized: once a backward pass, after every device's part of it.

An end-of-backward callback of the autograd engine does it. What no callback reaches (a compiled
backward cannot queue one; a backward that raised runs none) waits for the entry of the next
outermost region of the thread whose forward it was.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from quaver.scaling.delayed import DelayedScalingState
from quaver.scaling.finalize import settle
from quaver.scaling.used import RECORDED, Used


class _Alive:
    """Held by the engine's callback alone: dead once the pass has ended, well or not."""


class _Pass(NamedTuple):
    used: Used
    alive: weakref.ref[_Alive]


class BackwardPasses:
    """The backward passes over one thread's forwards.

    Backward runs on other threads, a thread a device: whence the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Pass] = {}
        self.compiled = Used()

    def join(self) -> Used:
        """What the running pass has used; its first caller queues the callback at its end."""
        with self._lock:
            return self._joined()

    def _joined(self) -> Used:
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        if running is None:
            alive = _Alive()
            running = self._running[task] = _Pass(Used(), weakref.ref(alive))
            if task != -1:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: self._end(task, alive))
        return running.used

    def note(self, state: DelayedScalingState, outer: Used | None) -> None:
        """A backward node has recorded amaxes in `state`: finalize it when the pass has ended.

        Args:
            outer: for a node whose forward was a recomputation: what the pass around it has used.
                Reentrant checkpointing runs such nodes in nested passes, and the scales must be
                updated once.
        """
        with self._lock:
            used = self._joined() if outer is None else outer
            used.add(state, RECORDED)

    def _end(self, task: int, alive: _Alive) -> None:
        with self._lock:
            ended = self._running.pop(task, None)
        if ended is not None:
            settle(ended.used)

    def settle(self) -> None:
        """Finalize what no callback has: at the entry of an outermost region, on every rank."""
        if self.compiled.states:
            settle(self.compiled)
        if torch.compiler.is_compiling() or not self._running:
            return
        with self._lock:
            left = {task: p for task, p in self._running.items() if p.alive() is None}
            for task in left:
                del self._running[task]
        for each in left.values():
            settle(each.used)
