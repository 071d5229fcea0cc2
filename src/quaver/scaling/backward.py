"""When backward scales are finalized: once a backward pass, after every device's part of it.

An end-of-backward callback of the autograd engine does it. What no callback reaches (a compiled
backward cannot queue one; a backward that raised runs none) waits for the entry of the next
outermost region of the thread whose forward it was.
"""

from __future__ import annotations

import threading

import torch

from quaver.scaling.finalize import settle
from quaver.scaling.state import RecipeState
from quaver.scaling.used import RECORDED, Used


class BackwardPasses:
    """The backward passes over one thread's forwards.

    Backward runs on other threads, a thread a device: whence the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, Used] = {}
        self.compiled = Used()

    def join(self) -> Used:
        """What the running pass has used; its first caller queues the callback at its end."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            used = self._running.get(task)
            if used is None:
                used = self._running[task] = Used()
                if task != -1:
                    engine = torch.autograd.Variable._execution_engine
                    engine.queue_callback(lambda: self._end(task))
            return used

    def note(self, state: RecipeState, outer: Used | None) -> None:
        """A backward node has recorded amaxes in `state`: finalize it when the pass has ended.

        Args:
            outer: for a node whose forward was a recomputation: what the pass around it has used.
                Reentrant checkpointing runs such nodes in nested passes, and the scales must be
                updated once.
        """
        used = self.join() if outer is None else outer
        with self._lock:
            used.add(state, RECORDED)

    def _end(self, task: int) -> None:
        with self._lock:
            used = self._running.pop(task, None)
        if used is not None:
            settle(used)

    def settle(self) -> None:
        """Finalize what no callback has: at the entry of an outermost region, on every rank."""
        if self.compiled.states:
            settle(self.compiled)
        if torch.compiler.is_compiling() or not self._running:
            return
        if torch._C._current_graph_task_id() != -1:  # inside a backward: its callback will come
            return
        with self._lock:
            left, self._running = list(self._running.values()), {}
        for used in left:
            settle(used)
