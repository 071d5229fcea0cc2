"""Rules of the source tree that no linter of ours states, as functions over a folder.

Each check takes the root of a package (src/quaver, or a small folder that a test wrote) and
returns one line for each place that breaks its rule; an empty list means that the rule holds.
"""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

DEVICE_LITERAL = re.compile(r"(cuda|sim|privateuseone)(:\d*)?")
DEVICE_NAMES = {
    "cuda",
    "is_cuda",
    "current_device",
    "current_device_index",
    "set_device",
    "set_device_index",
}
KNOW_DEVICES = ("devices/*", "simulator/*", "cli/*", "testing.py", "testing/*")
READ_ENVIRONMENT = ("devices/*", "simulator/*", "cli/*")
IMPORT_TRITON = ("kernels/*/triton.py", "kernels/*/triton_*.py")
OPTIONAL = {"accelerate", "gguf", "peft", "transformers", "triton"}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Path below `root` and syntax tree of each Python file; links to folders are not followed."""
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(), filename=str(path))


def allowed(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path below the root matches one of the patterns (`*` also crosses folders)."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def imported(node: ast.AST) -> list[str]:
    """Absolute dotted names that an import statement may load; relative ones lose their dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        prefix = f"{node.module}." if node.module else ""
        return [prefix + alias.name for alias in node.names]
    return []


def long_files(root: Path, limit: int) -> list[str]:
    """Python and C++ files of more than `limit` lines."""
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".h", ".cpp"}:
            lines = len(path.read_text().splitlines())
            if lines > limit:
                found.append(f"{path.relative_to(root).as_posix()}: {lines} lines")
    return found


def long_functions(root: Path, limit: int = 60) -> list[str]:
    """Functions of more than `limit` lines, from `def` to the last line, docstring included."""
    found = []
    for path, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    found.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    return found


def device_literals(root: Path) -> list[str]:
    """Names of device types and torch's current device outside the places that know them.

    What quaver.devices exports, such as its own current_device, may be used anywhere above it.
    """
    found = []
    for path, tree in modules(root):
        if allowed(path, KNOW_DEVICES):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if DEVICE_LITERAL.fullmatch(text):
                    found.append(f"{path}:{node.lineno}: {text!r}")
                case ast.Attribute(attr=name) if name in DEVICE_NAMES:
                    found.append(f"{path}:{node.lineno}: {name}")
                case ast.ImportFrom(module=str(module)) if not module.startswith("quaver."):
                    found.extend(
                        f"{path}:{node.lineno}: {name}"
                        for name in imported(node)
                        if DEVICE_NAMES.intersection(name.split("."))
                    )
    return found


def environment_reads(root: Path) -> list[str]:
    """Uses of os.environ and os.getenv outside the places that read settings."""
    names = {"environ", "environb", "getenv", "getenvb"}
    found = []
    for path, tree in modules(root):
        if allowed(path, READ_ENVIRONMENT):
            continue
        for node in ast.walk(tree):
            used = [name.removeprefix("os.") for name in imported(node) if name.startswith("os.")]
            if isinstance(node, ast.Attribute):
                used.append(node.attr)
            found.extend(f"{path}:{node.lineno}: {name}" for name in used if name in names)
    return found


def triton_imports(root: Path) -> list[str]:
    """Imports of the package triton outside kernels/<op>/triton.py."""
    return [
        f"{path}:{node.lineno}: {name}"
        for path, tree in modules(root)
        if not allowed(path, IMPORT_TRITON)
        for node in ast.walk(tree)
        if not (isinstance(node, ast.ImportFrom) and node.level)
        for name in imported(node)
        if name.split(".")[0] == "triton"
    ]


def assertions(root: Path) -> list[str]:
    """`assert` statements: what a user passes is checked by errors that survive `python -O`."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def nested_imports(root: Path) -> list[str]:
    """Imports inside functions, but for optional packages and the kernels' own triton.py."""
    found: dict[str, None] = {}  # a dict keeps the order; a nested function is walked twice
    for path, tree in modules(root):
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
        for node in (inner for function in functions for inner in ast.walk(function)):
            for name in imported(node):
                optional = name.split(".")[0] in OPTIONAL
                if not optional and not (path.startswith("kernels/") and "triton" in name):
                    found[f"{path}:{node.lineno}: {name}"] = None
    return list(found)


def root_imports(root: Path) -> list[str]:
    """Imports of the public package itself by its own parts, which would go upward."""
    submodules = {path.stem for path in root.iterdir() if path.name != "__init__.py"}
    own_face = ("__init__.py", "cli/*", "testing.py", "testing/*")
    found = []
    for path, tree in modules(root):
        if allowed(path, own_face):
            continue
        for node in ast.walk(tree):
            for name in imported(node):
                package, *rest = name.split(".")
                if package == root.name and (not rest or rest[0] not in submodules):
                    found.append(f"{path}:{node.lineno}: {name}")
    return found


def folders_without_init(root: Path) -> list[str]:
    """Folders that hold Python files but no __init__.py, which an install would leave out."""
    folders = {path.parent for path in root.rglob("*.py")}
    return sorted(
        folder.relative_to(root).as_posix()
        for folder in folders
        if not (folder / "__init__.py").exists()
    )


def unimportable_names(module: ModuleType) -> list[str]:
    """Names in `__all__` that the module does not have; all of them if there is no `__all__`."""
    names = getattr(module, "__all__", None)
    if not names:
        return [f"{module.__name__} has no __all__"]
    return [name for name in names if not hasattr(module, name)]
