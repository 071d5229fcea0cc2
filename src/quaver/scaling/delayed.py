"""The state of DelayedScaling: scales and amax histories."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from quaver.devices import has_fp8_gemm
from quaver.errors import QuaverError
from quaver.formats import MAX
from quaver.kernels import amax, cast, cast_grad
from quaver.kernels.cast.reference import scale_from_amax
from quaver.kernels.scaled_mm.layouts import TENSOR
from quaver.recipe import DelayedScaling, Recipe
from quaver.scaling.state import RecipeState, Request, Scales, makes_state
from quaver.scaling.uses import KEPT
from quaver.tensors import Operand, Payload, Quantized


@makes_state(DelayedScaling)
class DelayedScalingState(RecipeState):
    """Scales and amax histories of one module's tensors in one direction.

    Attributes:
        scale: float32 [n]; multiplies before the cast.
        amax_history: float32 [amax_history_len, n]; row 0 accumulates, the last row is the newest.
        ready: float32 [n]; 1 where `scale` was set, 0 where nothing is known yet.
        unset: a bool a slot: True while the host does not know that `ready` is 1.
        dtype: the FP8 dtype of this direction.
        limit: fp8_max * 2^-margin: what an amax is scaled to.
        past: the scales before each of the last updates, if a forward may ask for them again.
    """

    recipe: DelayedScaling

    def __init__(
        self, recipe: DelayedScaling, mode: str, num_quantizers: int, device: torch.device
    ) -> None:
        super().__init__(recipe, mode, num_quantizers)
        self._adopt(recipe)
        self.past: deque[Scales] = deque(maxlen=KEPT)
        self._keeps_until = 0
        known = recipe.first_scale == "one"
        self.unset = [not known] * num_quantizers
        # A state made in inference mode must still be updated in place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            make = partial(torch.full, dtype=torch.float32, device=device)
            self.scale = make((num_quantizers,), 1.0)
            self.ready = make((num_quantizers,), float(known))
            self.amax_history = make((recipe.amax_history_len, num_quantizers), 0.0)

    @property
    def device(self) -> torch.device:
        """Where the state's tensors live."""
        return self.scale.device

    @property
    def stores_transposed(self) -> bool:
        """Whether a column-wise operand is the transposed payload in memory, and not a view."""
        return has_fp8_gemm(self.scale.device)

    def _adopt(self, recipe: DelayedScaling) -> None:
        """Follow `recipe`, and work out once what every cast asks of it."""
        self.recipe = recipe
        self.dtype = recipe.fp8_format.dtype(self.mode)
        self.limit = MAX[self.dtype] * 2.0**-recipe.margin

    def expect(self, slot: int) -> None:
        """Say that `slot` is about to be cast: its scale is asked for at the next finalization."""
        if self.unset[slot]:
            self.cast_unset[slot] = True

    def keep_scales(self) -> None:
        """Keep the scales of the next updates for a forward that begins now."""
        self._keeps_until = self.updates + KEPT

    @property
    def keeps_scales(self) -> bool:
        """Whether the scales before the next update are to be kept."""
        return self.updates < self._keeps_until

    def updated(self, before: Scales | None) -> None:
        """Note an update.

        Args:
            before: the scales before it; None: nobody will ask.
        """
        self.updates += 1
        if before is None:
            self.past.clear()
        else:
            self.past.append(before)

    def scales_at(self, updates: int) -> Scales | None:
        """The scales as they were after `updates` updates; None: as they are now.

        Raises:
            QuaverError: that is too long ago.
        """
        age = self.updates - updates
        if age == 0:
            return None
        if age > len(self.past):
            raise QuaverError(
                f"a recomputed forward needs the scales that its first run used, {age} updates ago,"
                f" but {len(self.past)} are kept; run its backward earlier"
            )
        return self.past[-age]

    def cast_arguments(
        self, slot: int, record: bool, again: Scales | None, columnwise: bool
    ) -> tuple[Any, ...]:
        """What the casts take after x: from `scale` to `margin`.

        Args:
            record: raise the slot's amax to max|x|.
            again: in a recomputation, the scales of the first run.
            columnwise: the transposed payload, too.
        """
        scale, ready = self.scale, self.ready if self.unset[slot] else None
        if again is not None:
            scale = again.scale
            ready = again.ready if again.unset is None or again.unset[slot] else None
        history = self.amax_history if record else None
        return scale, history, ready, slot, self.dtype, columnwise, self.recipe.margin

    def quantize(
        self, x: torch.Tensor, slot: int, *, record: bool, again: Scales | None = None
    ) -> Payload:
        """Cast x [..., K] on the state's device with the scale of `slot`; see `cast_arguments`."""
        data, _, scale_inv = cast(x, *self.cast_arguments(slot, record, again, False))
        return Payload(data, scale_inv)

    def operands(self, x: torch.Tensor, slot: int, request: Request) -> Quantized:
        """Cast x [M, K] with the scale of `slot`; one payload serves both operands.

        Where hardware multiplies FP8 it wants the transposed payload in memory, and it is made in
        the same pass; elsewhere a view will do.
        """
        rowwise, columnwise, record, again, _ = request
        stored = columnwise and has_fp8_gemm(x.device)
        results = cast(x, *self.cast_arguments(slot, record, again, stored))
        return as_operands(results, rowwise, columnwise)

    def grad_operands(
        self, grad: torch.Tensor, slot: int, request: Request, summed: bool
    ) -> tuple[Quantized, torch.Tensor | None]:
        """As `operands`; the sum of the rows, where it is wanted, is made in the same pass."""
        if not summed:
            return self.operands(grad, slot, request), None
        rowwise, columnwise, record, again, _ = request
        stored = columnwise and has_fp8_gemm(grad.device)
        *results, total = cast_grad(grad, *self.cast_arguments(slot, record, again, stored))
        return as_operands(results, rowwise, columnwise), total

    def observe(self, x: torch.Tensor, slot: int) -> None:
        """Record max|x| without a cast, for calibration."""
        self.expect(slot)
        amax(x, self.amax_history, slot)

    def set_scale(self, slot: int, x: torch.Tensor) -> None:
        """Set the scale of `slot` from the amax of x, ahead of any update.

        Until the first update a cast goes on taking the amax of what it is given, if the recipe
        says so: x may be loaded anew.
        """
        own = torch.zeros(1, dtype=torch.float32, device=x.device)
        amax(x, own, 0)
        self.scale[slot] = scale_from_amax(own[0], self.limit)

    def forget(self, slot: int) -> None:
        """The tensor of `slot` was replaced: what is known of its scale holds no longer."""
        if self.recipe.first_scale == "amax":
            self.ready[slot] = 0.0
            self.unset[slot] = True

    def follow(self, recipe: Recipe) -> bool:
        """Follow `recipe` from now on: the scales and the newest history entries are kept.

        Returns:
            False if the recipe is of another class, which needs another state.
        """
        if not isinstance(recipe, DelayedScaling):
            return False
        if recipe == self.recipe:
            return True
        if recipe.amax_history_len != self.amax_history.shape[0]:
            self.amax_history = resized_history(self.amax_history, recipe.amax_history_len)
        if recipe.first_scale == "one" and any(self.unset):
            self.unset = [False] * self.num_quantizers
            self.ready.fill_(1.0)
        before = self.limit
        self._adopt(recipe)
        if self.limit != before:  # another format or margin: the amaxes stay what they were
            with torch.no_grad():
                factor = torch.where(self.scale != 1.0, self.limit / before, 1.0)
                self.scale.mul_(factor)
            self.past = deque(
                (past._replace(scale=past.scale * self.limit / before) for past in self.past), KEPT
            )
        return True

    def move(self, device: torch.device) -> None:
        """Take the state to `device`, values kept; from the meta device there are none to keep."""
        if self.device.type == "meta" and device.type != "meta":
            fresh = DelayedScalingState(self.recipe, self.mode, self.num_quantizers, device)
            for name in (*_TENSORS, "unset", "cast_unset"):
                setattr(self, name, getattr(fresh, name))
            return
        with torch.inference_mode(False), torch.no_grad():
            for name in _TENSORS:
                setattr(self, name, getattr(self, name).to(device))
        self.past.clear()

    def copy(self) -> RecipeState:
        """An independent state with the same values; it registers itself when it is used."""
        twin = super().copy()
        with torch.inference_mode(False), torch.no_grad():
            for name in _TENSORS:
                setattr(twin, name, getattr(self, name).clone())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update(unset=list(self.unset), past=deque(maxlen=KEPT))
        return state


def as_operands(results: Sequence[torch.Tensor], rowwise: bool, columnwise: bool) -> Quantized:
    """The operands asked for, from the payload, the transposed payload and scale_inv of a cast.

    Where the transposed payload was not made, it is a view of the other.
    """
    data, transposed, scale = results
    column = None
    if columnwise:
        column = Operand(transposed if transposed.dim() > 1 else data.t(), scale, TENSOR)
    return Quantized(Operand(data, scale, TENSOR) if rowwise else None, column)


_TENSORS = ("scale", "ready", "amax_history")


def resized_history(history: torch.Tensor, length: int) -> torch.Tensor:
    """`history` [L, n] as [length, n]: row 0 (accumulating) and the newest rows, at the end."""
    with torch.inference_mode(False), torch.no_grad():
        new = history.new_zeros(length, history.shape[1])
        new[0] = history[0]
        kept = min(length, history.shape[0]) - 1
        if kept:
            new[-kept:] = history[-kept:]
    return new
