"""A conversion in a process of its own: memory, and SIGKILL."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quaver.checkpoint import convert_checkpoint
from tests.checkpoint.folders import read, same, write

pytestmark = pytest.mark.slow

SHARDS = 12
CONVERT = """
import resource, sys
from quaver.checkpoint import convert_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_checkpoint(sys.argv[1], sys.argv[2], format=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def large(folder: Path, mebibytes: int) -> Path:
    """A checkpoint in files of so many MiB."""
    tensors = {f"layers.{i}.weight": torch.randn(1024, 256 * mebibytes) for i in range(SHARDS)}
    return write(folder, tensors, shards=SHARDS)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERT, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_memory_is_bounded_by_the_largest_file(tmp_path: Path) -> None:
    source = large(tmp_path / "source", 16)
    with start(source, tmp_path / "out", "finegrained-fp8") as process:
        grown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert int(grown) < 5 * 16  # of 12 * 16 MiB: a file mapped, its values, the payload, and torch


def test_killed_it_goes_on(tmp_path: Path) -> None:
    source = large(tmp_path / "source", 4)
    out = tmp_path / "out"
    with start(source, out, "fbgemm-fp8") as process:
        while len(list(out.glob("*.safetensors"))) < 3 and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert 3 <= len(kept) < SHARDS
    convert_checkpoint(source, out, format="fbgemm-fp8")
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    convert_checkpoint(source, tmp_path / "whole", format="fbgemm-fp8")
    one, two = read(out), read(tmp_path / "whole")
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)
    assert not list(out.glob(".*"))
