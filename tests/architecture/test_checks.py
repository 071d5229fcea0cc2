"""Each check of checks.py finds an offender, and lets pass what looks like one and is none."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from tests.architecture import checks

Check = Callable[[Path], list[str]]

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
FULL_FUNCTION = "def f():\n" + "    x = 1\n" * 59

OFFENDERS: list[tuple[Check, str, str]] = [
    (checks.long_functions, "nn/linear.py", LONG_FUNCTION),
    (checks.long_functions, "nn/linear.py", "class A:\n" + "  async " + LONG_FUNCTION),
    (checks.device_literals, "nn/linear.py", "x = 'cuda'"),
    (checks.device_literals, "nn/linear.py", "x = 'cuda:1'"),
    (checks.device_literals, "nn/linear.py", "x = f'sim:{i}'"),
    (checks.device_literals, "nn/linear.py", "if x.device.type == 'sim': pass"),
    (checks.device_literals, "scaling/state.py", "torch.cuda.current_device()"),
    (checks.device_literals, "scaling/state.py", "torch.accelerator.set_device_index(1)"),
    (checks.device_literals, "scaling/state.py", "from torch.cuda import current_device"),
    (checks.device_literals, "recipe.py", "x = x.cuda()"),
    (checks.environment_reads, "nn/linear.py", "import os\nx = os.environ['A']"),
    (checks.environment_reads, "nn/linear.py", "import os\nx = os.getenv('A')"),
    (checks.environment_reads, "nn/linear.py", "from os import environ as e"),
    (checks.triton_imports, "kernels/cast/op.py", "import triton"),
    (checks.triton_imports, "kernels/triton.py", "import triton"),
    (checks.triton_imports, "nn/linear.py", "def f():\n    from triton.language import load"),
    (checks.assertions, "nn/linear.py", "def f(x):\n    assert x"),
    (checks.nested_imports, "nn/linear.py", "def f():\n    import json"),
    (checks.nested_imports, "nn/linear.py", "def f():\n    from quaver.kernels.cast import triton"),
    (checks.nested_imports, "nn/linear.py", "def f():\n    def g():\n        from os import path"),
    (checks.root_imports, "nn/linear.py", "import quaver"),
    (checks.root_imports, "nn/linear.py", "from quaver import autocast"),
    (checks.folders_without_init, "extra/module.py", "x = 1"),
]

INNOCENTS: list[tuple[Check, str, str]] = [
    (checks.long_functions, "nn/linear.py", FULL_FUNCTION),
    (checks.device_literals, "devices/guard.py", "x = torch.cuda.current_device()"),
    (checks.device_literals, "simulator/load.py", "x = 'sim'"),
    (checks.device_literals, "testing.py", "x = 'cuda:0'"),
    (checks.device_literals, "nn/linear.py", "x = 'on cuda:1, not on cpu'"),
    (checks.device_literals, "nn/linear.py", "x = 'similar'"),
    (checks.device_literals, "nn/linear.py", "from quaver.devices import current_device as c\nc()"),
    (checks.environment_reads, "devices/settings.py", "import os\nx = os.environ['A']"),
    (checks.environment_reads, "nn/linear.py", "import os\nx = os.path"),
    (checks.triton_imports, "kernels/cast/triton.py", "import triton.language as tl"),
    (checks.triton_imports, "kernels/cast/op.py", "from . import triton"),
    (checks.nested_imports, "nn/linear.py", "import json\nif json:\n    import os"),
    (checks.nested_imports, "convert.py", "def f():\n    import transformers"),
    (checks.nested_imports, "kernels/cast/op.py", "def f():\n    from . import triton"),
    (checks.root_imports, "nn/linear.py", "from quaver import errors\nimport quaver.errors"),
    (checks.root_imports, "cli/app.py", "import quaver as qv"),
    (checks.folders_without_init, "module.py", "x = 1"),
]


def case_id(value: object) -> str:
    return getattr(value, "__name__", str(value)).split("\n", maxsplit=1)[0]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "quaver"
    root.mkdir()
    (root / "__init__.py").touch()
    (root / "errors.py").touch()
    return root


def write(root: Path, path: str, source: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(source) + "\n")


@pytest.mark.parametrize(("check", "path", "source"), OFFENDERS, ids=case_id)
def test_offender_is_found(check: Check, path: str, source: str, package: Path) -> None:
    write(package, path, source)
    found = check(package)
    assert found
    assert found[0].startswith(Path(path).parts[0])


@pytest.mark.parametrize(("check", "path", "source"), INNOCENTS, ids=case_id)
def test_innocent_passes(check: Check, path: str, source: str, package: Path) -> None:
    write(package, path, source)
    assert check(package) == []


@pytest.mark.parametrize("name", ["module.py", "csrc/module.h", "csrc/module.cpp"])
def test_long_file_is_found(name: str, package: Path) -> None:
    write(package, name, "x\n" * 9 + "x")
    assert checks.long_files(package, limit=10) == []
    assert checks.long_files(package, limit=9) == [f"{name}: 10 lines"]


def test_missing_public_name_is_found() -> None:
    module = ModuleType("offender")
    assert checks.unimportable_names(module) == ["offender has no __all__"]
    module.here = 1  # type: ignore[attr-defined]
    module.__all__ = ["here", "gone"]  # type: ignore[attr-defined]
    assert checks.unimportable_names(module) == ["gone"]
