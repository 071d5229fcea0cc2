"""The tests notice when what keeps devices apart is taken out: one mutation for each cause.

Each mutation changes a copy of the package, and a few of the tests run on it in another process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import quaver

ROOT = Path(__file__).parents[2]
SOURCE = Path(quaver.__file__).parent

Edit = tuple[str, str, str]  # file, text as it is, text in its place

MULTI_DEVICE = "tests/integration/test_multi_device.py::test_"
PLACEMENT = "tests/integration/test_placement.py::test_"
DISTRIBUTED = "tests/integration/test_distributed.py::test_"
TESTS = {
    "launch": [
        MULTI_DEVICE + "standalone_quantize_and_dequantize[sim-1-0-dtype0]",
        MULTI_DEVICE + "a_backward_called_by_hand_under_another_device[sim-1-0]",
    ],
    "placement": [
        PLACEMENT + "a_state_is_made_on_the_device_that_is_named[sim-forward]",
        PLACEMENT + "states_are_on_the_modules_device_before_any_forward[sim]",
    ],
    "grouping": [
        MULTI_DEVICE + "two_modules_on_different_devices_in_one_autocast[sim]",
        MULTI_DEVICE + "three_modules_interleaved_over_two_devices[sim]",
    ],
    "reduction": [
        DISTRIBUTED + "one_buffer_in_registration_order_on_the_first_registered_device[sim]",
    ],
}


class Mutation(NamedTuple):
    """Edits, the tests that must fail after them, and a word of the error that they must give."""

    edits: list[Edit]
    tests: list[str]
    error: str


MUTATIONS = {
    "the launch guard removed": Mutation(
        [("kernels/door.py", "    previous = pin(device)\n", "    previous = -1\n")],
        TESTS["launch"],
        "illegal memory access",
    ),
    "states made on the current device": Mutation(
        [
            (
                "scaling/delayed.py",
                "partial(torch.full, dtype=torch.float32, device=device)",
                "partial(torch.full, dtype=torch.float32, device=device.type)",
            ),
            (
                "nn/base.py",
                "            if state.device != device:\n                state.move(device)\n",
                "",
            ),
        ],
        TESTS["placement"],
        "AssertionError",
    ),
    "finalization not grouped by device": Mutation(
        [
            (
                "scaling/finalize.py",
                "    for group in group_by_device(states, lambda state: state.device).values():\n"
                "        _update(group, None)\n",
                "    _update(states, None)\n",
            )
        ],
        TESTS["grouping"],
        "must be on one device",
    ),
    "reduction not grouped by device": Mutation(
        [
            (
                "scaling/finalize.py",
                "group_by_device(alive, lambda pair: pair[1].device)",
                "{first: alive}",
            )
        ],
        TESTS["reduction"],
        "same device",
    ),
}

RUN = """
import sys, pytest, quaver
if not quaver.__file__.startswith(sys.argv[1]):
    sys.exit(f"the tests would run on {quaver.__file__}")
sys.exit(pytest.main(sys.argv[2:]))
"""


def run_on_copy(folder: Path, edits: list[Edit], tests: list[str]) -> tuple[int, str]:
    """Exit status and output of pytest on a copy of the package with `edits`."""
    shutil.copytree(SOURCE, folder / "quaver", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, replacement in edits:
        path = folder / "quaver" / name
        source = path.read_text()
        assert source.count(text) == 1, (
            f"{name} no longer has this text once; mend the test:\n{text}"
        )
        path.write_text(source.replace(text, replacement))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_copy_as_it_is_passes(tmp_path: Path) -> None:
    tests = [name for names in TESTS.values() for name in names]
    status, output = run_on_copy(tmp_path, [], tests)
    assert status == 0, output
    assert f"{len(tests)} passed" in output


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    status, output = run_on_copy(tmp_path, mutation.edits, mutation.tests)
    assert status == 1, output
    assert f"{len(mutation.tests)} failed" in output
    assert "passed" not in output.splitlines()[-1]
    assert mutation.error in output
