"""Where the simulator cannot be built, the tests that need it fail in one line; others run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NEEDS_IT = "tests/integration/test_multi_device.py::test_two_devices_never_share_scratch[sim]"
DOES_NOT = "tests/architecture/test_tree.py::test_the_checks_see_the_whole_source"


def test_without_a_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", NEEDS_IT, DOES_NOT],
        cwd=ROOT,
        env={**os.environ, "PATH": "", "QUAVER_CACHE_DIR": str(tmp_path), "CXX": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout
    assert lines[-1].startswith("1 passed, 1 error"), done.stdout
    (line,) = [line for line in lines if line.startswith("ERROR ")]
    assert NEEDS_IT in line
    assert [line for line in lines if "the simulator needs a C++ compiler" in line]
    assert [line for line in lines if "--devices cpu" in line]
    assert "Traceback" not in done.stdout
