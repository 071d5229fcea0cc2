"""Facts about the 8-bit floating-point formats.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (E4M3 and E5M2).
"""

from typing import Final

import torch

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2

MAX: Final[dict[torch.dtype, float]] = {E4M3: 448.0, E5M2: 57344.0}
"""The largest finite value of each format."""

NAMES: Final[dict[torch.dtype, str]] = {E4M3: "E4M3", E5M2: "E5M2"}

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
