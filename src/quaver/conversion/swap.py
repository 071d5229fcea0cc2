"""The swap of one layer's class, in place and back; nothing else of the layer changes."""

import functools
import sys
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

from torch import nn

from quaver.nn import Linear
from quaver.nn.conv1d import QuantizedConv1D, combined_class
from quaver.nn.weights import QuantizedWeights
from quaver.recipe import Recipe

RECORD = "_quaver_conversion"
"""The attribute of a converted module that holds its `Conversion`."""

# Where an instance may hold its class's forward: accelerate keeps the one that it wraps in
# `_old_forward`, and puts it back as `forward` when its hook is removed.
_HELD_FORWARDS = ("forward", "_old_forward")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did to a layer.

    Args:
        original: the class before; None if it was Quaver's already.
        recipe: attached before.
        quantized: whether the conversion quantized the weight.
    """

    original: type[nn.Module] | None
    recipe: Recipe | None
    quantized: bool = False

    @property
    def converted(self) -> type[nn.Module] | None:
        """The class that the conversion gave; None if it gave none."""
        return None if self.original is None else _quantized_class(self.original)


def _conv1d_class() -> type[nn.Module] | None:
    """transformers' Conv1D; None while nobody has imported it, since no model can have one then."""
    module = sys.modules.get("transformers.pytorch_utils")
    return getattr(module, "Conv1D", None)


def _quantized_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Quaver's class for layers of class `cls`.

    A subclass gets a class made for it, which is still a subclass of it.
    """
    if cls is nn.Linear:
        return Linear
    if issubclass(cls, nn.Linear):
        return combined_class(Linear, cls)
    return combined_class(QuantizedConv1D, cls)


def has_twin(module: nn.Module) -> bool:
    """Whether Quaver has a class for `module`, or `module` is Quaver's already."""
    conv1d = _conv1d_class()
    return isinstance(module, QuantizedWeights | nn.Linear) or (
        conv1d is not None and isinstance(module, conv1d)
    )


def is_exact_twin(module: nn.Module) -> bool:
    """Whether `module` is just what Quaver has a twin of, not a subclass."""
    return type(module) in (nn.Linear, _conv1d_class())


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored [in_features, out_features], as transformers' Conv1D does."""
    conv1d = _conv1d_class()
    return conv1d is not None and isinstance(module, conv1d)


def swap_in(module: nn.Module, name: str, recipe: Recipe | None) -> QuantizedWeights:
    """Make `module` Quaver's in place and attach `recipe`; one that is so already gets the recipe.

    Args:
        module: an nn.Linear, a transformers Conv1D, or a Quaver module.
        name: qualified name, for warnings.
        recipe: None attaches nothing, and leaves one that is attached already.
    """
    if isinstance(module, QuantizedWeights):
        module.__dict__.setdefault(RECORD, Conversion(None, module.recipe))
        if recipe is not None:
            module.recipe = recipe
        return module
    original = type(module)
    set_class(module, _quantized_class(original))
    converted = cast(QuantizedWeights, module)
    converted._init_quantized(recipe)
    converted.qualified_name = name
    converted.__dict__[RECORD] = Conversion(original, None)
    return converted


def swap_out(module: QuantizedWeights) -> None:
    """Undo `swap_in`, but for a quantized weight."""
    record: Conversion = module.__dict__.pop(RECORD)
    if record.original is None:
        module.recipe = record.recipe
        return
    module._drop_quantized()
    set_class(module, record.original)


def conversion_of(module: nn.Module) -> Conversion | None:
    """What was done to `module`; None if nothing was."""
    return module.__dict__.get(RECORD)


def record_quantized(module: nn.Module) -> None:
    """Remember that the conversion quantized the weight, so that the way back dequantizes it."""
    module.__dict__[RECORD] = replace(module.__dict__[RECORD], quantized=True)


@dataclass(frozen=True)
class Snapshot:
    """A module's class and attributes, to which `restore` takes it back."""

    module: nn.Module
    cls: type[nn.Module]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> "Snapshot":
        """The module as it is now; its scaling states are copied, since they change in place."""
        attributes = dict(module.__dict__)
        states = attributes.get("recipe_states")
        if states:
            attributes["recipe_states"] = {mode: state.copy() for mode, state in states.items()}
        return cls(module, type(module), attributes)

    def restore(self) -> None:
        """Undo what `swap_in` did since."""
        if type(self.module) is not self.cls:
            set_class(self.module, self.cls)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether a call of `module` never reaches its class's forward, since the instance has another.

    Accelerate's wrapper reaches it, through `_old_forward`.
    """
    held = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    return held is not None and not _is_class_forward(module, held)


def _is_class_forward(module: nn.Module, held: object) -> bool:
    return (
        isinstance(held, MethodType)
        and held.__self__ is module
        and held.__func__ is type(module).forward
    )


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Do `module.__class__ = cls`, along with the bound forwards that the instance itself holds."""
    held = [name for name in _HELD_FORWARDS if _is_class_forward(module, module.__dict__.get(name))]
    module.__class__ = cls
    bound = MethodType(cls.forward, module)
    for name in held:
        module.__dict__[name] = bound
    wrapper = module.__dict__.get("forward")
    if "_old_forward" in held and isinstance(wrapper, functools.partial):
        functools.update_wrapper(wrapper, bound)  # its signature is looked up there
