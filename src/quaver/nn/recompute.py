"""Activation recompute on torch.utils.checkpoint, with random numbers repeated on every device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from quaver.devices import RngStates, drawn_from, rng_states, rng_states_set
from quaver.nn.random import RNGStatesTracker, States

_DEFAULTS = {"context_fn": noop_context_fn, "determinism_check": "default", "debug": False}

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None = None,
    **kwargs: Any,
) -> Any:
    """function(*args, **kwargs), whose activations are computed anew in the backward pass.

    torch.utils.checkpoint.checkpoint, which repeats random numbers on the CPU and on the devices of
    `args` only; this one does on every device that `function` draws on, so that a function may be
    spread over devices. Quantized modules inside repeat the scales of the first run.

    Args:
        function, args, kwargs: what is computed.
        use_reentrant, context_fn, determinism_check, debug: as for torch's.
        preserve_rng_state: False: the recomputation draws other random numbers (dropout then gives
            wrong gradients); saves reading the generators' states.
        get_rng_state_tracker: gives the tracker whose streams `function` forks; they are repeated,
            too.

    Returns:
        What `function` returned.
    """
    given: dict[str, Any] = {
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
    }
    options = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    if use_reentrant and options:
        raise ValueError(f"{', '.join(options)} needs use_reentrant=False, but it is True")
    if use_reentrant and kwargs:
        function = partial(function, **kwargs)
    else:
        options.update(kwargs)
    options["use_reentrant"] = use_reentrant
    if torch.compiler.is_compiling():  # the compiler replays random numbers itself
        return torch_checkpoint(function, *args, preserve_rng_state=preserve_rng_state, **options)
    if preserve_rng_state or get_rng_state_tracker is not None:
        tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
        function = _Repeatable(function, preserve_rng_state, tracker)
    return torch_checkpoint(function, *args, preserve_rng_state=False, **options)


class _Repeatable:
    """A function that draws the same random numbers at each call.

    At the first call it notes which generators were drawn from; only those are set back at later
    ones, since another device's backward may be drawing from its own at the time.
    """

    def __init__(
        self, function: Callable[..., Any], generators: bool, tracker: RNGStatesTracker | None
    ) -> None:
        self._function = function
        self._generators = generators
        self._tracker = tracker
        self._ran = False
        self._drawn: RngStates = {}
        self._streams: States = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ran:
            return self._again(*args, **kwargs)
        before = rng_states() if self._generators else {}
        if self._tracker is not None:
            self._streams = self._tracker.get_states()
        result = self._function(*args, **kwargs)
        self._drawn = drawn_from(before)
        self._ran = True
        return result

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(rng_states_set(self._drawn))
            if self._tracker is not None:
                stack.callback(self._tracker.set_states, self._tracker.get_states())
                self._tracker.set_states(self._streams)
            return self._function(*args, **kwargs)
