"""The main job: a real language model in FP8, split over two devices, against full precision."""

from quaver.cli.demo.options import DemoOptions
from quaver.cli.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
