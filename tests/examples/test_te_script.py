"""A script for TransformerEngine runs unmodified, on a simulated device and on the CPU."""

import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quaver.testing import launches

SCRIPT = str(Path(__file__).parents[2] / "examples" / "te_script.py")


def test_it_trains_in_fp8_on_the_current_device(monkeypatch, devices) -> None:
    from quaver.integrations import transformer_engine

    monkeypatch.setattr(sys, "argv", [SCRIPT, "--steps", "30"])
    transformer_engine.enable()
    try:
        with launches() as log:
            loss = runpy.run_path(SCRIPT)["main"]()
    finally:
        transformer_engine.disable()
    assert loss < 3.4  # log(32) is 3.47, where it begins
    assert {launch.device for launch in log} == {devices[0]}
    # two layers of six linears: query, key, value, proj, and two of the MLP
    assert [launch.kernel for launch in log].count("scaled_mm") == 30 * 2 * 6 * 3


@pytest.mark.slow
def test_it_runs_as_its_first_lines_say_in_under_a_minute() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "quaver.shim", SCRIPT], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 60
    last = [line for line in done.stdout.splitlines() if line.startswith("step")][-1]
    assert float(last.split()[-1]) < 2
