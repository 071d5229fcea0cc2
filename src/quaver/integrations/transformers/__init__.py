"""transformers: `from_pretrained` straight into quantized layers, and `save_pretrained` of them.

Importing this package registers `QuaverConfig`, so that folders that were saved with it load.
"""

from quaver.integrations.transformers.config import QuaverConfig
from quaver.integrations.transformers.quantizer import QuaverHfQuantizer

__all__ = ["QuaverConfig", "QuaverHfQuantizer"]
