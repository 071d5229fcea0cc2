"""Code that was written for TransformerEngine, unmodified: its modules resolve to Quaver.

    import quaver.integrations.transformer_engine as shim
    shim.enable()
    import transformer_engine.pytorch as te

or `python -m quaver.shim script.py` for a script that is not to be touched. Options that mean
nothing here are accepted at their defaults and refused otherwise.
"""

from quaver.integrations.transformer_engine.finder import install as enable
from quaver.integrations.transformer_engine.finder import installed as is_enabled
from quaver.integrations.transformer_engine.finder import uninstall as disable
from quaver.integrations.transformer_engine.table import VERSION

__all__ = ["VERSION", "disable", "enable", "is_enabled"]
