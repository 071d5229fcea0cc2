"""The state of the recipes whose scales come from the tensor itself: its quantizers."""

from __future__ import annotations

import zlib

import torch

from quaver.errors import RecipeError
from quaver.kernels import next_number
from quaver.kernels.scaled_mm.layouts import PLAIN
from quaver.quantizers import Quantizer, quantizer_of
from quaver.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from quaver.scaling.state import RecipeState, Request, makes_state
from quaver.tensors import Operand, Quantized

PLAIN_ROLES = ("output", "grad_input")
"""What a linear leaves in high precision: its outputs."""


@makes_state(
    Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe
)
class StatelessState(RecipeState):
    """The quantizers of one module in one direction, and the number of its forwards."""

    def __init__(
        self, recipe: Recipe, mode: str, num_quantizers: int, device: torch.device
    ) -> None:
        super().__init__(recipe, mode, num_quantizers)
        self._device = device
        self._quantizers: dict[int, Quantizer | None] = {}
        self._draws: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the module was last used."""
        return self._device

    def belong(self, name: str, module_type: str) -> None:
        """Say whose state this is; the quantizers are made for that module."""
        super().belong(name, module_type)
        self._quantizers = {}
        for slot in range(self.num_quantizers):
            role = self.role(slot)
            if role.tensor not in PLAIN_ROLES:
                self._quantizers[slot] = quantizer_of(self.recipe, role)
        if any(q is not None and q.draws_bits for q in self._quantizers.values()):
            # The forwards of one module are numbered; those of two draw different bits.
            first = zlib.crc32(name.encode()) << 31
            with torch.inference_mode(False):
                self._draws = torch.full((1,), first, dtype=torch.int64, device=self._device)

    def draw(self) -> torch.Tensor | None:
        """The number of this forward, int64 [1]; None where nothing draws random bits."""
        if self._draws is None:
            return None
        number: torch.Tensor = next_number(self._draws)
        return number

    def transforms(self, slot: int) -> bool:
        """Whether the column-wise operand of `slot` goes through the Hadamard transform."""
        return bool(getattr(self._quantizers.get(slot), "hadamard", False))

    def last_number(self) -> int | None:
        """The number of the last forward, read from its device; None without random bits."""
        if self._draws is None or self._draws.device.type == "meta":
            return None
        return int(self._draws.item())

    def resume(self, number: int) -> None:
        """Number the forwards from `number` on."""
        if self._draws is not None:
            self._draws.fill_(number)

    def operands(self, x: torch.Tensor, slot: int, request: Request) -> Quantized:
        """Quantize x [M, K] with the quantizer of `slot`."""
        quantizer = self._quantizers[slot]
        if quantizer is None:
            return Quantized(Operand(x, None, PLAIN), Operand(x.t(), None, PLAIN))
        return quantizer.quantize(
            x, request.rowwise, request.columnwise, draw=request.draw, group=self.group
        )

    def follow(self, recipe: Recipe) -> bool:
        """Follow `recipe` from now on; False if it is of another class."""
        if type(recipe) is not type(self.recipe):
            return False
        if recipe != self.recipe:
            self.recipe, draws = recipe, self._draws
            self.belong(self.name, self.module_type)
            if draws is not None:  # the numbers go on: no random bits are drawn twice
                self._draws = draws
        return True

    def move(self, device: torch.device) -> None:
        """Take the number of the forwards along; from the meta device there is none to take."""
        self._device = device
        if self._draws is not None and self._draws.device.type == "meta":
            self.belong(self.name, self.module_type)
        elif self._draws is not None:
            with torch.inference_mode(False):
                self._draws = self._draws.to(device)

    def copy(self) -> RecipeState:
        """An independent state with the same quantizers and numbers."""
        twin = super().copy()
        if isinstance(twin, StatelessState) and twin._draws is not None:
            with torch.inference_mode(False):
                twin._draws = twin._draws.clone()
        return twin


def check_transforms(forward: RecipeState, backward: RecipeState) -> None:
    """Raise where one operand of a product would be transformed and the other not.

    The column-wise input and gradient meet in the weight's gradient; the column-wise weight meets
    the gradient's rows, which are never transformed.

    Raises:
        RecipeError: says which quantizers must agree.
    """
    if not (isinstance(forward, StatelessState) and isinstance(backward, StatelessState)):
        return
    if forward.recipe.backward_override is not None:  # the backward uses no column-wise operand
        return
    if forward.transforms(1) or forward.transforms(0) != backward.transforms(0):
        raise RecipeError(
            "hadamard must be the same for the quantizers of input and grad_output, and False for "
            f"that of weight; {forward.recipe!r} gives input {forward.transforms(0)}, grad_output "
            f"{backward.transforms(0)}, weight {forward.transforms(1)}"
        )
