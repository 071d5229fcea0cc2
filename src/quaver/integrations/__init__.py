"""Quaver under other libraries; each part needs its library, and is imported on first use."""

import importlib
from typing import Any

_PARTS = ("lightning", "transformer_engine", "transformers")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"quaver.integrations.{name}")
    raise AttributeError(f"module 'quaver.integrations' has no attribute {name!r}")
