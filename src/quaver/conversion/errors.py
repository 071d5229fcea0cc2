"""The error of a conversion that cannot be carried out."""

from quaver.errors import QuaverError


class ConversionError(QuaverError, ValueError):
    """A conversion was asked for that cannot be carried out; the model is as it was before."""
