"""The tests notice when what keeps devices apart is taken out: one mutation for each cause.

Each mutation changes a copy of the package, and a few of the tests run on it in another process:
on simulated devices, which refuse an access to another's memory, and with `-m multi_gpu` on GPUs,
which with peer access allow it.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import quaver
from tests.integration.triton_hook import enable_peer_access

ROOT = Path(__file__).parents[2]
SOURCE = Path(quaver.__file__).parent

TRITON = importlib.util.find_spec("triton") is not None

Edit = tuple[str, str, str]  # file, text as it is, text in its place

MULTI_DEVICE = "tests/integration/test_multi_device.py::test_"
PLACEMENT = "tests/integration/test_placement.py::test_"
DISTRIBUTED = "tests/integration/test_distributed.py::test_"
HOOK = "tests/multi_gpu/test_triton_hook.py::test_"
TESTS = {
    "launch": [
        MULTI_DEVICE + "standalone_quantize_and_dequantize[sim-1-0-dtype0]",
        MULTI_DEVICE + "a_backward_called_by_hand_under_another_device[sim-1-0]",
    ],
    "hook": [
        HOOK + "a_kernel_under_another_device[sim-cast]",
        HOOK + "a_kernel_under_another_device[sim-dequantize]",
        HOOK + "a_kernel_under_another_device[sim-scale_update]",
        HOOK + "layers_on_both_devices_in_turn[sim]",
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
    """Edits, the tests that must fail after them, and a word of the error that they must give.

    Args:
        error: on simulated devices, and on GPUs unless `gpu_error` is another one.
    """

    edits: list[Edit]
    tests: list[str]
    error: str
    gpu_error: str | None = None


NO_GUARD = ("kernels/door.py", "    previous = pin(device)\n", "    previous = -1\n")
NO_CHECK = ("kernels/door.py", "        if check is not None:\n", "        if False:\n")

SILENT = ", and nothing refuses"

MUTATIONS = {
    "the launch guard removed": Mutation(
        [NO_GUARD], TESTS["launch"], "illegal memory access", "AssertionError"
    ),
    # As with peer access: the simulated devices are kept from refusing.
    f"the launch guard removed{SILENT}": Mutation(
        [NO_GUARD, NO_CHECK], TESTS["hook"], "AssertionError"
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

SLOW = (f"the launch guard removed{SILENT}", "reduction not grouped by device")
"""In the second step of CI, as the others show the same kind of test at work."""

RUN = """
import sys, pytest, quaver, torch
from tests.integration.triton_hook import enable_peer_access
if not quaver.__file__.startswith(sys.argv[1]):
    sys.exit(f"the tests would run on {quaver.__file__}")
if sys.argv[2] == "cuda":  # a kernel on the wrong GPU is to succeed, and to be noticed
    enable_peer_access([torch.device("cuda", i) for i in range(2)])
sys.exit(pytest.main(sys.argv[3:]))
"""


def run_on_copy(folder: Path, kind: str, edits: list[Edit], tests: list[str]) -> tuple[int, str]:
    """Exit status and output of pytest on a copy of the package with `edits`.

    Args:
        kind: "sim" or "cuda", the devices on which the tests run.
    """
    shutil.copytree(SOURCE, folder / "quaver", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, replacement in edits:
        path = folder / "quaver" / name
        source = path.read_text()
        assert source.count(text) == 1, (
            f"{name} no longer has this text once; mend the test:\n{text}"
        )
        path.write_text(source.replace(text, replacement))
    options = ["-q", "-p", "no:cacheprovider"]
    if kind == "cuda":
        options += ["-m", "multi_gpu"]
    names = [name.replace("[sim", f"[{kind}") for name in tests]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), kind, *options, *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100 if kind == "sim" else 300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(
    params=["sim", pytest.param("cuda", marks=[pytest.mark.multi_gpu, pytest.mark.timeout(320)])]
)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA GPUs")
        if not enable_peer_access([torch.device("cuda", i) for i in range(2)]):
            pytest.skip("needs GPUs with peer access, so that a mis-launch is no illegal access")
    found: str = request.param
    return found


def test_the_copy_as_it_is_passes(tmp_path: Path, kind: str) -> None:
    tests = [name for key, names in TESTS.items() if key != "hook" or TRITON for name in names]
    status, output = run_on_copy(tmp_path, kind, [], tests)
    assert status == 0, output
    assert f"{len(tests)} passed" in output


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MUTATIONS],
)
def test_a_mutation_is_noticed(tmp_path: Path, kind: str, name: str) -> None:
    mutation = MUTATIONS[name]
    if mutation.tests is TESTS["hook"] and not TRITON:
        pytest.skip("Triton is not installed")
    status, output = run_on_copy(tmp_path, kind, mutation.edits, mutation.tests)
    assert status == 1, output
    assert f"{len(mutation.tests)} failed" in output, output
    assert "passed" not in output.splitlines()[-1]
    error = mutation.error if kind == "sim" else mutation.gpu_error or mutation.error
    assert error in output, output
