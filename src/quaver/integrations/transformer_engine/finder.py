"""How Python finds the shim: its modules, and a distribution of the name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from quaver.integrations.transformer_engine.table import MODULES, VERSION

DISTRIBUTION = "transformer-engine"

_PACKAGES = {name.rpartition(".")[0] for name in MODULES} - {""}


class ShimDistribution(importlib.metadata.Distribution):
    """What importlib.metadata says of `transformer-engine`: a name and a version, no files."""

    def read_text(self, filename: str) -> str | None:
        """The contents of METADATA; None for any other file."""
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n"
            "Summary: Quaver in the place of TransformerEngine\n"
        )

    def locate_file(self, path: object) -> Path:
        """Where a file of it would be, if it had any."""
        return Path(__file__).parent / str(path)


class ShimFinder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds the modules of `transformer_engine`, and loads them from the table."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the shim; None for any other."""
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="quaver", is_package=fullname in _PACKAGES
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """None: an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module, and import the modules below it, as scripts expect."""
        name = module.__name__
        module.__dict__.update(MODULES[name]())
        module.__doc__ = "Quaver under the name of a module of TransformerEngine."
        for child in MODULES:
            if child.rpartition(".")[0] == name:
                importlib.import_module(child)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The distribution, if it is asked for."""
        name = None if context is None else context.name
        if name is None or name.lower().replace("_", "-") == DISTRIBUTION:
            yield ShimDistribution()


_finder = ShimFinder()


def _is_shim(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.loader is _finder


def install() -> None:
    """Put the finder before all others.

    Raises:
        RuntimeError: another `transformer_engine` was imported.
    """
    for name in ("transformer_engine", "transformer_engine_torch"):
        if name in sys.modules and not _is_shim(name):
            raise RuntimeError(
                f"{name} was imported already, and is not Quaver's; call enable() before that"
            )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Take the finder and its modules away again; what was imported from them goes on working."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [name for name in MODULES if _is_shim(name)]:
        del sys.modules[name]


def installed() -> bool:
    """Whether the finder is in place."""
    return _finder in sys.meta_path
