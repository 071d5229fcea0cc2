"""Conversion of a model's linear layers to Quaver's, in place and back, and what runs where."""

from quaver.conversion.back import convert_back
from quaver.conversion.convert import convert
from quaver.conversion.errors import ConversionError
from quaver.conversion.report import (
    AdjustedModule,
    AttachedAttention,
    BypassedLayer,
    ConversionReport,
    ConvertedLayer,
    FusedModule,
    SkippedLayer,
    UnfusedNorm,
    UnmatchedRule,
)
from quaver.conversion.rules import DEFAULT_EXCLUDE, Rule
from quaver.conversion.status import AttentionStatus, LayerStatus, ModelStatus, status

__all__ = [
    "DEFAULT_EXCLUDE",
    "AdjustedModule",
    "AttachedAttention",
    "AttentionStatus",
    "BypassedLayer",
    "ConversionError",
    "ConversionReport",
    "ConvertedLayer",
    "FusedModule",
    "LayerStatus",
    "ModelStatus",
    "Rule",
    "SkippedLayer",
    "UnfusedNorm",
    "UnmatchedRule",
    "convert",
    "convert_back",
    "status",
]
