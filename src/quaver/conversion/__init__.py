"""Conversion of a model's linear layers to Quaver's, in place and back, and what runs where."""

from quaver.conversion.back import convert_back
from quaver.conversion.convert import convert
from quaver.conversion.errors import ConversionError
from quaver.conversion.report import (
    AdjustedModule,
    BypassedLayer,
    ConversionReport,
    ConvertedLayer,
    SkippedLayer,
    UnmatchedRule,
)
from quaver.conversion.rules import DEFAULT_EXCLUDE, Rule
from quaver.conversion.status import LayerStatus, ModelStatus, status

__all__ = [
    "DEFAULT_EXCLUDE",
    "AdjustedModule",
    "BypassedLayer",
    "ConversionError",
    "ConversionReport",
    "ConvertedLayer",
    "LayerStatus",
    "ModelStatus",
    "Rule",
    "SkippedLayer",
    "UnmatchedRule",
    "convert",
    "convert_back",
    "status",
]
