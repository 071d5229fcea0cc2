"""quantized_model_init: modules made inside have quantized weights from the start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from quaver.devices import default_generators
from quaver.errors import RecipeError
from quaver.quantizers import IdentityQuantizer, quantizer_of
from quaver.recipe import Recipe, Role

InitMethod = Callable[[torch.Tensor], Any]
"""Fills a weight in place, as the functions of torch.nn.init do."""


class InitOptions(NamedTuple):
    """What `quantized_model_init` was given."""

    recipe: Recipe | None
    preserve: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[InitOptions | None] = []
        self.seeds: list[Iterator[int]] = []


_thread = _Thread()


class quantized_model_init(ContextDecorator):  # noqa: N801 - the name that users know
    """Context manager: Quaver's modules made inside get quantized weights.

    Each weight is drawn in high precision on its own device, quantized there with its own amax, and
    the high-precision value is dropped.

    Args:
        enabled: False: weights made inside stay in high precision.
        recipe: names the format; None: the module's own, else DelayedScaling().
        preserve_high_precision_init_val: keep the high-precision value on the CPU, for an
            optimizer's master weights: `weight.get_high_precision_init_val()`, then
            `weight.clear_high_precision_init_val()`.

    Raises:
        RecipeError: `recipe` is not a recipe.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if not isinstance(enabled, bool):
            raise RecipeError(
                f"enabled must be True or False, not {enabled!r}; a recipe goes to recipe="
            )
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(f"recipe must be a recipe such as DelayedScaling(), not {recipe!r}")
        self._options = InitOptions(recipe, preserve_high_precision_init_val) if enabled else None

    def __enter__(self) -> None:
        _thread.stack.append(self._options)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.stack.pop()


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Context manager: what Quaver's modules draw for their weights depends on no device split.

    Each module that is made inside, or drawn anew, has a seed of its own, made of `seed` and how
    many modules came before; the generator of its device is as before afterwards. Elsewhere a
    module goes on with its device's generator, as torch's modules do, and so draws other numbers
    where modules before it lie on another device. Generators of the CPU and of accelerators differ.

    Args:
        seed: 0 to 2^31 - 1.

    Raises:
        ValueError: another seed.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"seed must be an integer from 0 to 2^31 - 1, not {seed!r}")
    # A generator of the CPU takes 32 bits: different for each module, and far apart for two seeds.
    _thread.seeds.append((seed * 0x9E3779B1 + module) % 2**32 for module in count())
    try:
        yield
    finally:
        _thread.seeds.pop()


@contextmanager
def module_seed(device: torch.device) -> Iterator[None]:
    """Context manager: draws of one module on `device`, by the `seeded_init` around, if any."""
    if not _thread.seeds or device.type == "meta":  # nothing is drawn there
        yield
        return
    generator = default_generators()[device]
    before = generator.get_state()
    generator.manual_seed(next(_thread.seeds[-1]))
    try:
        yield
    finally:
        generator.set_state(before)


def current_init() -> InitOptions | None:
    """The options of the innermost `quantized_model_init` of this thread; None: not quantized."""
    return _thread.stack[-1] if _thread.stack else None


def quantize_parameter(
    weight: torch.Tensor, recipe: Recipe, preserve: bool, role: Role
) -> nn.Parameter:
    """`weight` as a quantized parameter on its own device, in the format that `recipe` has for it.

    Args:
        preserve: keep the high-precision value on the CPU, reachable from the parameter.
        role: which module's weight it is.

    Returns:
        The parameter; where the recipe leaves this weight in high precision, that one unchanged.
    """
    quantizer = quantizer_of(recipe, role)
    if quantizer is None or isinstance(quantizer, IdentityQuantizer):
        return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    # A second copy only where the backward needs it and it cannot be made from the first.
    quantizer.rowwise = True
    quantizer.columnwise = weight.requires_grad and not quantizer.transposes_losslessly
    value = weight.detach()
    with torch.inference_mode(False):  # else nothing could be trained with it later
        parameter = nn.Parameter(quantizer(value), requires_grad=weight.requires_grad)
    if preserve and value.device.type != "meta":
        parameter._high_precision_init_val = value.cpu().clone()  # type: ignore[attr-defined]
    return parameter
