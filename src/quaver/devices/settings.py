"""Settings read from the environment, once."""

import os

IMPLEMENTATION = os.environ.get("QUAVER_IMPLEMENTATION") or None
"""Which version of the kernels runs: "reference", "triton", or None for each device's best."""
