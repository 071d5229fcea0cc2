"""The update of one scaling state, slot by slot, written in NumPy from the specification."""

from collections.abc import Callable

import numpy as np

from tests.kernels.numerics import FLOAT32_MAX


def updated(
    history: np.ndarray,
    scale: np.ndarray,
    ready: np.ndarray,
    reduced: np.ndarray | None,
    limit: float,
    algorithm: str | Callable[[np.ndarray], np.float32],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The next history [L, n], scale [n] and readiness [n]; nothing is written in place."""
    history, scale, ready = history.copy(), scale.copy(), ready.copy()
    length, slots = history.shape
    for i in range(slots):
        old = history[:, i].copy()
        last = old[0] if reduced is None or reduced[i] == 0 else reduced[i]
        if last == 0:
            continue
        for j in range(length - 1):
            history[j, i] = old[j + 1]
        history[length - 1, i] = last
        history[0, i] = 0
        amax = _amax(old, last, algorithm)
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                quotient = np.float32(limit) / np.float32(amax)
            scale[i] = FLOAT32_MAX if np.isinf(quotient) else quotient
            ready[i] = 1
    return history, scale, ready


def _amax(old: np.ndarray, last: np.float32, algorithm: object) -> np.float32:
    if algorithm == "most_recent":
        return last
    if algorithm == "max":
        finite = [entry for entry in (*old, last) if np.isfinite(entry)]
        return max(finite, default=np.float32(0))
    shown = old.copy()
    shown[0] = last
    return algorithm(shown)
