"""The source tree keeps the rules of checks.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

import quaver
from tests.architecture import checks

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "quaver"


@pytest.mark.parametrize(
    "check",
    [
        checks.long_functions,
        checks.device_literals,
        checks.environment_reads,
        checks.triton_imports,
        checks.assertions,
        checks.nested_imports,
        checks.root_imports,
        checks.folders_without_init,
    ],
    ids=lambda check: check.__name__,
)
def test_source_keeps_the_rule(check: Callable[[Path], list[str]]) -> None:
    assert check(SOURCE) == []


@pytest.mark.parametrize(
    ("folder", "limit"),
    [("src", 400), ("tests", 500), ("examples", 400), ("benchmarks", 400)],
)
def test_files_stay_short(folder: str, limit: int) -> None:
    assert checks.long_files(REPOSITORY / folder, limit) == []


def test_the_checks_see_the_whole_source() -> None:
    """A check over an empty or wrong folder would pass whatever the code does."""
    seen = {path for path, _ in checks.modules(SOURCE)}
    assert {"__init__.py", "errors.py", "devices/guard.py"} <= seen


def test_public_names_exist() -> None:
    assert checks.unimportable_names(quaver) == []
