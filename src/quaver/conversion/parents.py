"""Parents that do not always call their linear layers: what their code says, and what to do.

A parent that reads `self.child.weight` in its own code computes with that weight itself, where it
does, and a child that runs in FP8 when called is then passed over. Which parents do so is read
from their source, so that models which nobody listed are covered as well.
"""

import ast
import inspect
import textwrap
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from types import FunctionType

from torch import nn

# What a parent may ask of a weight without computing with it.
_METADATA = frozenset(
    {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta"}
)
_QUESTIONS = frozenset({"isinstance", "getattr", "hasattr", "setattr", "type", "id"})
# Methods that set parameters up; they are no part of a forward.
_SETUP = frozenset({"init_weights", "post_init", "tie_weights", "extra_repr"})

_CHANGED = "_quaver_changed"


@dataclass
class ChildUse:
    """How the code of one parent class uses a child: the names of the methods that do."""

    reads: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


def weight_reads(parent: nn.Module) -> dict[str, ChildUse]:
    """By name, the children whose `.weight` the code of `parent` computes with."""
    if isinstance(parent, nn.TransformerEncoderLayer):
        return {}  # its fast path is what reads them, and `adjust` disables that
    cls = type(parent)
    if cls not in _known:
        _known[cls] = _weight_reads(cls)
    return _known[cls]


_known: dict[type[nn.Module], dict[str, ChildUse]] = {}


def _weight_reads(parent: type[nn.Module]) -> dict[str, ChildUse]:
    methods = list(methods_of(parent))
    if not any("weight" in method.__code__.co_names for method in methods):
        return {}
    uses: dict[str, ChildUse] = {}
    for method in methods:
        for child, is_read in _mentions(method):
            use = uses.setdefault(child, ChildUse())
            names = use.reads if is_read else use.calls
            if method.__name__ not in names:
                names.append(method.__name__)
    return {child: use for child, use in uses.items() if use.reads}


def methods_of(parent: type[nn.Module]) -> Iterator[FunctionType]:
    """The methods in force of `parent`, without those of nn.Module and those that only set up."""
    seen: set[str] = set()
    for cls in parent.__mro__:
        if cls is nn.Module:
            return
        for name, value in vars(cls).items():
            method = inspect.unwrap(value) if callable(value) else value
            is_setup = name.startswith(("__", "reset_", "_reset_", "_init_")) or name in _SETUP
            if isinstance(method, FunctionType) and name not in seen and not is_setup:
                yield method
            seen.add(name)


def _mentions(method: FunctionType) -> Iterator[tuple[str, bool]]:
    """(child, whether its weight is read) for each `self.child.weight` and each bare `self.child`.

    A bare one is a call, or hands the child to somebody who calls it.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return  # no source, no knowledge
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and isinstance(node.ctx, ast.Load)
        ):
            continue
        above = parents[node]
        if not isinstance(above, ast.Attribute):
            yield node.attr, False
        elif above.attr == "weight" and _is_computed_with(above, parents[above]):
            yield node.attr, True


def _is_computed_with(weight: ast.Attribute, above: ast.AST) -> bool:
    if not isinstance(weight.ctx, ast.Load) or isinstance(above, ast.Compare):
        return False
    if isinstance(above, ast.Attribute):
        return above.attr not in _METADATA and not above.attr.startswith("_")
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Name):
        return above.func.id not in _QUESTIONS
    return True


def adjustable_parents(
    model: nn.Module, converted: Container[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` that may pass over one of the `converted` layers, with their names."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoderLayer)
            and (module.linear1 in converted or module.linear2 in converted)
        ) or (
            isinstance(module, nn.TransformerEncoder)
            and any(below in converted for below in module.modules())
        ):
            yield name, module


def adjust(module: nn.Module) -> str:
    """Make `module` call its converted linear layers where it would pass them over.

    Returns:
        What was changed, in words; empty if there was nothing to change.
    """
    if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu:
        # Only the fast path reads this flag; the activation itself is another attribute.
        _change(module, "activation_relu_or_gelu", 0)
        return "fast path of eval mode disabled: it reads linear1.weight and linear2.weight"
    if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
        _change(module, "use_nested_tensor", False)
        return "nested tensors of eval mode disabled: only the layers' fast path takes them"
    return ""


def restore(module: nn.Module) -> str:
    """Undo `adjust`; returns what was restored, empty if nothing."""
    changed: dict[str, object] = module.__dict__.pop(_CHANGED, {})
    module.__dict__.update(changed)
    return f"restored {', '.join(changed)}" if changed else ""


def _change(module: nn.Module, name: str, value: object) -> None:
    changed = dict(module.__dict__.get(_CHANGED, {}))  # a snapshot may hold the old one
    changed[name] = getattr(module, name)
    module.__dict__[_CHANGED] = changed
    module.__dict__[name] = value
