"""The shim in place for a test, and gone after it."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from quaver.integrations import transformer_engine as shim


@pytest.fixture
def te() -> Iterator[ModuleType]:
    """`transformer_engine.pytorch`."""
    shim.enable()
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]

    yield te
    shim.disable()
