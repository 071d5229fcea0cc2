"""What every quantizing module shares: its states, its place, and the frame of a forward."""

from __future__ import annotations

import threading
import warnings
from typing import Any, ClassVar, NamedTuple

import torch
from torch._dynamo.comptime import comptime

from quaver.devices import get_module_device, pin, unpin
from quaver.errors import RecipeError
from quaver.nn.loading import ExtraStateAsBuffer, find_offloaded_state
from quaver.nn.tracing import refresh_states, refuse_recomputation
from quaver.recipe import DelayedScaling, Recipe
from quaver.scaling import Call, RecipeState, begin_call, current_region, end_call, note_forward
from quaver.scaling.calls import HIGH_PRECISION, note_high_precision
from quaver.scaling.extra_state import pack, pack_number, unpack, unpack_number
from quaver.scaling.state import SLOT_NAMES
from quaver.scaling.stateless import check_transforms
from quaver.tensors import Quantized


class Frame(NamedTuple):
    """A forward that is under way: how it runs, and what to put back at its end."""

    call: Call
    device: torch.device
    previous: int


class _Frames(threading.local):
    """Per thread: two threads may run one module."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []


_frames = _Frames()


_OWN_ATTRIBUTES = (
    "recipe",
    "recipe_states",
    "qualified_name",
    "_weight_cache",
    "_prepared",
    "_resumed",
)


class QuantizedModule(ExtraStateAsBuffer):
    """Mixin of modules that quantize; stands before the torch class that they extend.

    Attributes:
        recipe: the attached recipe, in force where no `autocast` names one; or None.
        recipe_states: the scaling states by direction, "forward" and "backward"; empty until they
            are first needed. They live on the module's device and follow it.
        qualified_name: where the module stands in its model, for messages; "" if unknown.
    """

    slots_per_gemm: ClassVar[dict[str, int]] = {"forward": 3, "backward": 2}
    slot_names: ClassVar[dict[str, tuple[str, ...]]] = SLOT_NAMES
    num_gemms = 1

    recipe: Recipe | None
    recipe_states: dict[str, RecipeState]
    qualified_name: str
    _weight_cache: dict[int, Quantized] | None
    _prepared: tuple[Recipe, torch.device] | None
    _resumed: int | None

    def _init_quantized(self, recipe: Recipe | None = None) -> None:
        """Give the module what this class needs; keeps the states that it has."""
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(f"recipe must be a recipe such as DelayedScaling(), not {recipe!r}")
        self.recipe = recipe
        self.recipe_states = getattr(self, "recipe_states", {})
        self.qualified_name = getattr(self, "qualified_name", "")
        self._weight_cache = None
        self._prepared = None
        self._resumed = None

    def _drop_quantized(self) -> None:
        """Take away again what `_init_quantized` gave."""
        for name in _OWN_ATTRIBUTES:
            self.__dict__.pop(name, None)

    # ---- the frame of a forward

    def prepare_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Begin a forward on x: its device becomes current, the states are ready. Returns x.

        `end_forward` must follow, also when the forward raises; when this raises, it has put
        everything back itself.

        Args:
            x: the input; its device is the execution device.

        Raises:
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        compiling = torch.compiler.is_compiling()
        if compiling:
            comptime(refuse_recomputation)
        device = x.device
        previous = -1 if compiling else pin(device)
        call = HIGH_PRECISION
        try:
            if not compiling:
                self._check_operands(x)
            self._refuse_lost_replica()
            state = None if compiling else self.recipe_states.get("forward")
            call = begin_call(self.recipe, state)
            if call.recipe is not None and not self._quantizes_with(call.recipe):
                end_call(call)
                call = HIGH_PRECISION
            if call.recipe is not None:
                self._prepare_states(call.recipe, device)
                self._note(call, x.requires_grad)
            elif state is not None:
                note_high_precision(state)
        except BaseException:
            end_call(call)
            unpin(device, previous)
            raise
        _frames.stack.append(Frame(call, device, previous))
        return x

    def end_forward(self) -> None:
        """End the forward that `prepare_forward` began on this thread: what it set is put back."""
        frame = _frames.stack.pop()
        try:
            end_call(frame.call)
        finally:
            unpin(frame.device, frame.previous)

    def current_call(self) -> Call:
        """How the forward that is under way on this thread runs."""
        return _frames.stack[-1].call

    def _check_operands(self, x: torch.Tensor) -> None:
        """Raise unless x and the parameters lie on one device; subclasses name their own."""

    def _quantizes_with(self, recipe: Recipe) -> bool:
        """Whether `recipe` asks this module to quantize anything."""
        return True

    def _refuse_lost_replica(self) -> None:
        if self.recipe is None and current_region() is None and "_is_replica" in self.__dict__:
            raise RecipeError(
                "a replica of nn.DataParallel runs on a thread of its own, outside of the autocast "
                "around the call; attach a recipe with convert(model, recipe=...) instead"
            )

    # ---- states

    def _prepare_states(self, recipe: Recipe, device: torch.device) -> None:
        """Make the states, follow `recipe`, and take them to `device`: a compare each as a rule."""
        # `recipe_states` itself is not read here: torch.compile would go on with what it read.
        prepared = self._prepared
        if prepared is None or prepared[1] != device or not _same(prepared[0], recipe):
            if torch.compiler.is_compiling():
                comptime(refresh_states)
            else:
                self._refresh_states(recipe, device)

    def _refresh_states(self, recipe: Recipe, device: torch.device) -> None:
        find_offloaded_state(self)
        if "_is_replica" in self.__dict__:
            # A replica of nn.DataParallel shares the original's dictionary. On the original's
            # device it shares the states too, and they learn; elsewhere it works on copies.
            self.recipe_states = {mode: s.copy() for mode, s in self.recipe_states.items()}
        for mode, per_gemm in self.slots_per_gemm.items():
            state = self.recipe_states.get(mode)
            if state is None or not state.follow(recipe):
                if state is not None:
                    _warn_of_another_class(state.recipe, recipe)
                    self._weight_cache = None
                state = self.recipe_states[mode] = RecipeState.create(
                    recipe, mode=mode, num_quantizers=per_gemm * self.num_gemms, device=device
                )
                state.slot_names = self.slot_names[mode]
                state.belong(self.qualified_name or repr(self), type(self).__name__)
                if self._resumed is not None:
                    state.resume(self._resumed)
            if state.device != device:
                state.move(device)
        check_transforms(self.recipe_states["forward"], self.recipe_states["backward"])
        self._prepared = (recipe, device)

    def _note(self, call: Call, requires_grad: bool) -> None:
        forward, backward = self.recipe_states["forward"], self.recipe_states["backward"]
        forward.group = backward.group = call.group
        note_forward(call, forward, backward, requires_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for state in self.recipe_states.values():
            # What `fn` does to a device is seen on an empty tensor; its dtype is not for states.
            target = fn(torch.empty(0, device=state.device)).device
            if target != state.device:
                state.move(target)
        self._weight_cache = None
        self._prepared = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Both can be made again, and plain pickle does not know FP8 tensors.
        return {**self.__dict__, "_weight_cache": None, "_prepared": None}

    # ---- checkpoints

    def _slots(self) -> dict[str, int]:
        return {mode: n * self.num_gemms for mode, n in self.slots_per_gemm.items()}

    def _delayed_recipe(self) -> DelayedScaling | None:
        return self.recipe if isinstance(self.recipe, DelayedScaling) else None

    def get_extra_state(self) -> torch.Tensor:
        """The scaling states for `state_dict`: a CPU uint8 tensor of fixed size, not a pickle."""
        packed = pack(self.recipe_states, self._slots(), self._delayed_recipe())
        backward = self.recipe_states.get("backward")
        pack_number(packed, self._resumed if backward is None else backward.last_number())
        return packed

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` gave, onto the device where this module lives.

        TransformerEngine's is taken as well: a pickle in a uint8 tensor or an io.BytesIO, of which
        nothing is executed.

        Raises:
            CheckpointError: `state` is neither.
        """
        restored = unpack(state, self._slots(), self._delayed_recipe())
        device = get_module_device(self)
        for restored_state in restored.values():
            restored_state.belong(self.qualified_name or repr(self), type(self).__name__)
            if device is not None and device.type != "meta":
                restored_state.move(device)
        self.recipe_states = dict(restored)
        self._resumed = unpack_number(state)
        self._prepared = None

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *args
        )
        self._weight_cache = None
        key = f"{prefix}_extra_state"  # a checkpoint of the torch twin has none
        if key in missing_keys:
            missing_keys.remove(key)


def _same(old: Recipe, new: Recipe) -> bool:
    """Equal by value; mostly it is the same object."""
    return old is new or old == new


_warned_changes: set[tuple[type, type]] = set()


def _warn_of_another_class(old: Recipe, new: Recipe) -> None:
    """Say once that what was learnt for one class of recipe is of no use to another."""
    change = (type(old), type(new))
    if change not in _warned_changes:
        _warned_changes.add(change)
        warnings.warn(
            f"the recipe changes from {change[0].__name__} to {change[1].__name__}: scales and "
            "histories begin anew, and kept weights are dropped",
            stacklevel=2,
        )
