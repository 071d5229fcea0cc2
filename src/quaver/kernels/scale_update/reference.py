"""The update of scales from amaxes (finalization), written out as a specification."""

from collections.abc import Callable

import torch

from quaver.errors import RecipeError
from quaver.formats import FLOAT32_MAX
from quaver.kernels.cast.reference import divide

ScaleRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def history_amax(history: torch.Tensor, last: torch.Tensor, algorithm: str) -> torch.Tensor:
    """The amaxes [n] that the history [L, n], with `last` [n] as its newest, speaks for."""
    if algorithm == "most_recent":
        return last
    entries = torch.cat([history, last.unsqueeze(0)])
    return torch.where(torch.isfinite(entries), entries, 0.0).amax(0)


def next_scale(amax: torch.Tensor, scale: torch.Tensor, limit: float) -> torch.Tensor:
    """limit / amax; the old scale where amax is 0 or not finite; at most the largest float32."""
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, divide(limit, amax).clamp(max=FLOAT32_MAX), scale)


def roll(history: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The history one update later: `last` is the newest, at the end; row 0 is free again."""
    rolled = torch.roll(history, -1, 0)
    rolled[-1] = last
    rolled[0] = 0.0
    return rolled


def scale_update(
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    readies: list[torch.Tensor],
    amaxes: torch.Tensor | None,
    limit: float,
    algorithm: str,
) -> None:
    """Update all states of one recipe and direction on one device.

    A slot whose amax is 0 was not seen since the last update and stays as it is.

    Args:
        histories: a state's [L, n] float32 each, the same L; row 0 holds what was accumulated.
        scales: its [n] each.
        readies: its [n] each; becomes 1 where a scale was set.
        amaxes: the reduced amaxes of all states, one after the other, flat; 0 means row 0. None:
            row 0 everywhere.
        limit: fp8_max * 2^-margin.
        algorithm: "max" or "most_recent".
    """
    history, scale = torch.cat(histories, 1), torch.cat(scales)
    last = history[0] if amaxes is None else torch.where(amaxes != 0, amaxes, history[0])
    amax = history_amax(history, last, algorithm)
    write_back((histories, scales, readies), history, last, next_scale(amax, scale, limit), amax)


def write_back(
    states: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]],
    history: torch.Tensor,
    last: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
) -> None:
    """Write the rolled histories and new scales of the slots that were seen, in place."""
    histories, scales, readies = states
    sizes = [s.numel() for s in scales]
    seen = last != 0
    new_history = torch.where(seen, roll(history, last), history)
    new_scale = torch.where(seen, scale, torch.cat(scales))
    was_set = seen & torch.isfinite(amax) & (amax > 0)
    new_ready = torch.where(was_set, 1.0, torch.cat(readies))
    torch._foreach_copy_(histories, new_history.split(sizes, 1))
    torch._foreach_copy_(scales, new_scale.split(sizes))
    torch._foreach_copy_(readies, new_ready.split(sizes))


def custom_scale_update(
    history: torch.Tensor,
    scale: torch.Tensor,
    ready: torch.Tensor,
    amaxes: torch.Tensor | None,
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rule: ScaleRule,
) -> None:
    """The update of one state with functions of the user's; arguments as in `scale_update`.

    Args:
        choose: (history [L, n] with the newest in row 0, newest [n]) -> amax [n].
        rule: (amax [n], scale [n]) -> scale [n].
    """
    last = history[0] if amaxes is None else torch.where(amaxes != 0, amaxes, history[0])
    shown = history.clone()
    shown[0] = last
    amax = _checked("amax_compute_algo", choose(shown, last), last)
    proposed = _checked("scaling_factor_compute_algo", rule(amax.clone(), scale.clone()), last)
    usable = torch.isfinite(proposed) & (proposed > 0)
    write_back(
        ([history], [scale], [ready]), history, last, torch.where(usable, proposed, scale), amax
    )


def _checked(function: str, result: object, last: torch.Tensor) -> torch.Tensor:
    """What a function of the user's returned, if it has the form it must have."""
    if not isinstance(result, torch.Tensor) or result.shape != last.shape:
        given = tuple(result.shape) if isinstance(result, torch.Tensor) else repr(result)
        raise RecipeError(
            f"{function} must return a tensor of shape {tuple(last.shape)}, not {given}"
        )
    return result.to(torch.float32)
