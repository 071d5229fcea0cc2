"""The main job: a real language model in FP8 or FP4 over two devices, against fp32."""

from quaver.cli.demo.options import DemoOptions
from quaver.cli.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
