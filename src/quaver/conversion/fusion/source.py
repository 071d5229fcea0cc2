"""What a module's code does with its children, as far as fusing them needs to know.

Read from the source of `forward`, so that no model has to be listed. Anything but the plain forms
below is not recognized, and says what stands in the way.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from quaver.conversion.parents import methods_of

Term = str | tuple[str, "Term"] | tuple[str, "Term", "Term"]
"""A formula: "x" is the input, (child, term) a call, ("*", term, term) a product."""


class UnrecognizedError(Exception):
    """The code is not of a form that can be fused; the message says why."""


class Use(NamedTuple):
    """A call of a child with some value.

    Attributes:
        child: its name.
        argument: which argument the value is, by keyword, or 0 for the first.
        alone: whether the call has no other one.
    """

    child: str
    argument: str | int
    alone: bool


def formula(module: nn.Module) -> Term:
    """What the forward of `module` returns, with its variables put in.

    Raises:
        UnrecognizedError: it is more than calls of children and products, one after the other.
    """
    definition = _definition(module)
    values: dict[str, Term] = {_first_parameter(definition): "x"}
    for statement in definition.body:
        match statement:
            case ast.Expr(value=ast.Constant()):  # the docstring
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _term(value, values, module)
            case ast.Return(value=ast.expr() as value):
                return _term(value, values, module)
            case _:
                break
    raise _unreadable(module)


def consumer_of(block: nn.Module, child: str) -> Use:
    """Which child takes the output of `child` in the block's forward, and how.

    Raises:
        UnrecognizedError: it is not one call of one child, and nothing else.
    """
    definition = _definition(block)
    above = _parents(definition)
    calls = [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Call) and _called_child(node) == child
    ]
    if len(calls) != 1:
        raise UnrecognizedError(f"{_name(block)}.forward calls it {len(calls)} times")
    use = _use(calls[0], above) or _use_of_variable(block, definition, calls[0], above)
    _check_mentions(block, definition, (child, use.child))
    return use


def _use_of_variable(
    block: nn.Module, definition: ast.FunctionDef, call: ast.expr, above: dict[ast.AST, ast.AST]
) -> Use:
    """The one use of the variable that gets the value of `call`, a statement of its own."""
    for i, statement in enumerate(definition.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value) if value is call:
                found = list(_uses(variable, definition.body[i + 1 :], above))
                if len(found) == 1 and found[0] is not None:
                    return found[0]
                raise UnrecognizedError(
                    f"{_name(block)}.forward does not give its output to one module alone"
                )
    raise UnrecognizedError(
        f"{_name(block)}.forward calls it under a condition, or inside an expression"
    )


def readers_of(module: nn.Module, argument: str | int) -> list[str]:
    """The children of `module` that are called, once each, with an argument of its forward.

    A branch that calls a child which the module does not have is left out: it cannot run.

    Args:
        argument: its name, or its position.

    Raises:
        UnrecognizedError: the argument is used in other ways, of which its shape without the last
            dimension, its dtype and its device are none; or the children are.
    """
    definition = _without_dead_branches(_definition(module), module)
    above = _parents(definition)
    names = [parameter.arg for parameter in definition.args.args[1:]]
    variable = argument if isinstance(argument, str) else names[argument]
    readers = []
    for node in _loads(variable, definition, module):
        if _is_harmless(node, above):
            continue
        call = above[node]
        reader = _called_child(call)
        if reader is None or not _takes_only(call, node):
            text = ast.unparse(_statement(node, above)).split("\n")[0]
            raise UnrecognizedError(f"{_name(module)}.forward does more than project it: {text}")
        readers.append(reader)
    _check_mentions(module, definition, readers)
    return readers


def _check_mentions(
    module: nn.Module, definition: ast.FunctionDef, children: Iterable[str]
) -> None:
    """Each of `children` must appear once in the forward, and in no other method."""
    forward = inspect.unwrap(type(module).forward)
    others = [method for method in methods_of(type(module)) if method is not forward]
    for child in children:
        times = sum(_own_attribute(node) == child for node in ast.walk(definition))
        if times != 1:
            raise UnrecognizedError(f"{_name(module)}.forward uses {child} {times} times")
        for method in others:
            if child in method.__code__.co_names:
                raise UnrecognizedError(f"{_name(module)}.{method.__name__} uses {child}, too")


def _loads(variable: str, definition: ast.FunctionDef, module: nn.Module) -> list[ast.Name]:
    """Where the variable is read until it gets another value, in the order of the source."""
    loads: list[ast.Name] = []
    for statement in definition.body:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == variable]
        loads += [name for name in names if isinstance(name.ctx, ast.Load)]
        if len(names) > sum(isinstance(name.ctx, ast.Load) for name in names):
            if not isinstance(statement, ast.Assign):
                raise UnrecognizedError(
                    f"{_name(module)}.forward gives {variable} another value under a condition"
                )
            break
    return sorted(loads, key=lambda name: (name.lineno, name.col_offset))


@functools.cache
def _parsed(forward: object) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    return definition if isinstance(definition, ast.FunctionDef) else None


def _definition(module: nn.Module) -> ast.FunctionDef:
    definition = _parsed(inspect.unwrap(type(module).forward))
    if definition is None or len(definition.args.args) < 2:
        raise UnrecognizedError(f"the source of {_name(module)}.forward cannot be read")
    return definition


def _first_parameter(definition: ast.FunctionDef) -> str:
    return definition.args.args[1].arg


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _unreadable(module: nn.Module) -> UnrecognizedError:
    return UnrecognizedError(
        f"{_name(module)}.forward is more than calls of its children and products"
    )


def _term(node: ast.expr, values: dict[str, Term], module: nn.Module) -> Term:
    match node:
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return ("*", _term(left, values, module), _term(right, values, module))
        case ast.Call(args=[argument], keywords=[]):
            child = _called_child(node)
            if child is not None:
                return (child, _term(argument, values, module))
    raise _unreadable(module)


def _own_attribute(node: ast.AST) -> str | None:
    """NAME where the node is `self.NAME`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _called_child(node: ast.AST) -> str | None:
    """NAME where the node is a call of `self.NAME`."""
    return _own_attribute(node.func) if isinstance(node, ast.Call) else None


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _statement(node: ast.AST, above: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = above[node]
    return node


def _use(value: ast.expr, above: dict[ast.AST, ast.AST]) -> Use | None:
    """The call of a child in which `value` stands as an argument; None: it stands elsewhere."""
    call = above[value]
    argument: str | int = 0
    if isinstance(call, ast.keyword):
        if call.arg is None:
            return None
        argument, call = call.arg, above[call]
    child = _called_child(call)
    if child is None or not isinstance(call, ast.Call):
        return None
    if argument == 0 and call.args[:1] != [value]:
        return None
    return Use(child, argument, len(call.args) + len(call.keywords) == 1)


def _uses(
    variable: str, statements: list[ast.stmt], above: dict[ast.AST, ast.AST]
) -> Iterator[Use | None]:
    """Each use of a variable until it gets another value; None for one that is no plain call."""
    for statement in statements:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == variable]
        for name in names:
            if isinstance(name.ctx, ast.Load):
                yield _use(name, above)
        if any(not isinstance(name.ctx, ast.Load) for name in names):
            if not isinstance(statement, ast.Assign):
                yield None  # it has another value under a condition only
            return


def _is_harmless(name: ast.Name, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether the use does not depend on the values, nor on the size of the last dimension."""
    attribute = above[name]
    if not isinstance(attribute, ast.Attribute):
        return False
    if attribute.attr in ("dtype", "device"):
        return True
    part = above[attribute]
    if attribute.attr != "shape" or not isinstance(part, ast.Subscript):
        return False
    return ast.unparse(part.slice) in (":-1", "0", "1")


def _takes_only(call: ast.AST, node: ast.Name) -> bool:
    return isinstance(call, ast.Call) and call.args == [node] and not call.keywords


def _without_dead_branches(definition: ast.FunctionDef, module: nn.Module) -> ast.FunctionDef:
    """A copy without the bodies of ifs that call a child which `module` does not have."""

    def lives(statements: list[ast.stmt]) -> bool:
        called = (_called_child(node) for each in statements for node in ast.walk(each))
        return all(child is None or hasattr(module, child) for child in called)

    class Prune(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            body: list[ast.stmt] = node.body if lives(node.body) else [ast.Pass()]
            orelse = node.orelse if lives(node.orelse) else []
            return ast.If(node.test, body, orelse)

    pruned = Prune().visit(ast.parse(ast.unparse(definition)).body[0])
    return ast.fix_missing_locations(pruned)  # type: ignore[no-any-return]
