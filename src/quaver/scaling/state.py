"""The scaling state of a module: what a recipe remembers from step to step.

A state belongs to one module and one direction, and lives on that module's device. It is a plain
object, not a buffer: a buffer would be cast by `module.to(torch.bfloat16)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from quaver.devices import has_current
from quaver.errors import RecipeError
from quaver.recipe import Recipe, Role
from quaver.scaling.uses import Uses
from quaver.tensors import Quantized

Maker = Callable[[Any, str, int, torch.device], "RecipeState"]

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")
SLOT_NAMES: dict[str, tuple[str, ...]] = {"forward": FORWARD_SLOTS, "backward": BACKWARD_SLOTS}
"""What the slots of a linear stand for, by direction; the same for each of several GEMMs."""


class Scales(NamedTuple):
    """A state's scales as they were between two updates.

    Attributes:
        unset: a bool a slot: False where the host knew that `ready` is 1; None: nowhere.
    """

    scale: torch.Tensor
    ready: torch.Tensor
    unset: tuple[bool, ...] | None = None


class Request(NamedTuple):
    """What is wanted of one quantization.

    Attributes:
        rowwise, columnwise: the operands to make.
        record: raise the slot's amax to max|x|.
        again: in a recomputation, the scales of the first run.
        draw: the number of the forward, for random bits; int64 [1].
    """

    rowwise: bool = True
    columnwise: bool = False
    record: bool = False
    again: Scales | None = None
    draw: torch.Tensor | None = None


class RecipeState:
    """What a recipe remembers of one module's tensors in one direction; base class.

    Attributes:
        recipe: the recipe that the state follows.
        mode: "forward" (slots: input, weight, output a GEMM) or "backward" (grad_output,
            grad_input).
        num_quantizers: how many slots there are.
        slot_names: which tensor each slot is for, in turn.
        group: the process group of the reduction, set by each use.
        name: of the module, for warnings.
        uses: the last forwards, for their recomputation.
        updates: how many finalizations the state has seen.
        cast_unset: a bool a slot: it was cast while the host did not know a scale for it.
    """

    def __init__(self, recipe: Recipe, mode: str, num_quantizers: int) -> None:
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.slot_names: tuple[str, ...] = SLOT_NAMES[mode]
        self.group: Any = None
        self.name = ""
        self.module_type = ""
        self.warned = False
        self.updates = 0
        self.uses = Uses()
        self.registered: set[Any] = set()
        self.cast_unset = [False] * num_quantizers

    @staticmethod
    def create(
        recipe: Recipe, *, mode: str, num_quantizers: int, device: torch.device | str | int
    ) -> RecipeState:
        """A new state of `recipe`.

        Args:
            mode: "forward" or "backward".
            num_quantizers: how many slots, n.
            device: where its tensors are made; never the current device.

        Raises:
            RecipeError: an unknown mode, a recipe without a state, or an accelerator without index.
        """
        if mode not in ("forward", "backward"):
            raise RecipeError(f'mode must be "forward" or "backward", not {mode!r}')
        place = torch.device(device)
        if has_current(place) and place.index is None:
            raise RecipeError(f"a device with an index is needed, such as {place}:0, not {place}")
        for recipe_class, make in _makers.items():
            if isinstance(recipe, recipe_class):
                return make(recipe, mode, num_quantizers, place)
        raise RecipeError(f"a recipe such as DelayedScaling() is needed, not {recipe!r}")

    @property
    def device(self) -> torch.device:
        """Where the state's tensors live."""
        raise NotImplementedError

    def belong(self, name: str, module_type: str) -> None:
        """Say whose state this is.

        Args:
            name: where the module stands in its model, or what it is.
            module_type: the name of its class.
        """
        self.name = name
        self.module_type = module_type

    def role(self, slot: int) -> Role:
        """Which tensor of which module `slot` is for."""
        names = self.slot_names
        return Role(names[slot % len(names)], self.name, self.module_type)

    def operands(self, x: torch.Tensor, slot: int, request: Request) -> Quantized:
        """Quantize x [M, K], on the state's device, as the tensor of `slot`."""
        raise NotImplementedError

    def grad_operands(
        self, grad: torch.Tensor, slot: int, request: Request, summed: bool
    ) -> tuple[Quantized, torch.Tensor | None]:
        """Quantize dy [M, N] as `operands` does, and sum its rows.

        Args:
            summed: whether the sum is wanted: the bias's gradient, float32 [N].
        """
        total = grad.sum(0, dtype=torch.float32) if summed else None
        return self.operands(grad, slot, request), total

    def scales_at(self, updates: int) -> Scales | None:
        """The scales as they were after `updates` updates; None: as they are now."""
        return None

    def keep_scales(self) -> None:
        """Say that a forward begins which may be repeated, with the scales as they are now."""

    def expect(self, slot: int) -> None:
        """Say that `slot` is about to be cast."""

    def transforms(self, slot: int) -> bool:
        """Whether the column-wise operand of `slot` goes through the Hadamard transform."""
        return False

    def draw(self) -> torch.Tensor | None:
        """The number of this forward, int64 [1], where its backward draws random bits."""
        return None

    def draws(self) -> tuple[torch.Tensor, ...]:
        """`draw` once a product; empty where nothing draws random bits."""
        products = self.num_quantizers // len(self.slot_names)
        drawn = (self.draw() for _ in range(products))
        return tuple(number for number in drawn if number is not None)

    def last_number(self) -> int | None:
        """The number of the last forward, where there are any."""
        return None

    def resume(self, number: int) -> None:
        """Number the forwards from `number` on."""

    def observe(self, x: torch.Tensor, slot: int) -> None:
        """Record what calibration needs of x, without a cast."""

    def forget(self, slot: int) -> None:
        """Say that the tensor of `slot` was replaced by another."""

    def set_scale(self, slot: int, x: torch.Tensor) -> None:
        """Set the scale of `slot` from x, ahead of any update."""

    def follow(self, recipe: Recipe) -> bool:
        """Follow `recipe` from now on; False if that needs another state."""
        raise NotImplementedError

    def move(self, device: torch.device) -> None:
        """Take the state to `device`, values kept."""
        raise NotImplementedError

    def copy(self) -> RecipeState:
        """An independent state with the same values; it registers itself when it is used."""
        twin: RecipeState = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> RecipeState:
        twin = memo[id(self)] = self.copy()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # Registration and process group belong to this object, not to what it holds.
        state = dict(self.__dict__)
        state.update(registered=set(), group=None, uses=Uses())
        state.update(cast_unset=list(self.cast_unset))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with torch.inference_mode(False), torch.no_grad():
            for name, value in state.items():  # what was read in inference mode must be trainable
                if isinstance(value, torch.Tensor) and value.is_inference():
                    self.__dict__[name] = value.clone()


_makers: dict[type[Recipe], Maker] = {}


C = TypeVar("C", bound=Maker)


def makes_state(*recipes: type[Recipe]) -> Callable[[C], C]:
    """Class decorator: the state of these recipes."""

    def register(maker: C) -> C:
        _makers.update(dict.fromkeys(recipes, maker))
        return maker

    return register
