"""The Triton kernels compile for GPUs that are not there: what the interpreter cannot show."""

import os
import subprocess
import sys

import pytest

CAPABILITIES = (80, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int) -> None:
    """In a process of its own, since Triton decides on import whether it interprets."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiling", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    for kernel in ("_cast", "_forward", "_backward", "_whole_rows", "_long_row", "_parts"):
        assert f" {kernel}" in run.stdout
