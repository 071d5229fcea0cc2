"""What every test gets: simulated devices, a seed of its own, and a watch on the current device."""

import os
import zlib
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported, which other packages do
    os.environ.setdefault("TRITON_INTERPRET", "1")

from quaver.errors import SimulatorUnavailableError
from quaver.testing import simulated_devices

GPU_MARKS = ("gpu", "multi_gpu")

_simulated = pytest.StashKey[list[torch.device] | str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the simulator before the first test, since it must precede the first backward pass.

    Not where GPU tests are selected: torch.accelerator would mean the simulator in their process.
    """
    simulated: list[torch.device] | str
    if any(item.get_closest_marker(mark) for item in session.items for mark in GPU_MARKS):
        simulated = "this process tests GPUs, and must not load the simulator: run pytest twice"
    else:
        try:
            simulated = simulated_devices(2)
        except SimulatorUnavailableError as error:  # only the tests that need it fail
            simulated = str(error)
    session.config.stash[_simulated] = simulated


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def devices(request: pytest.FixtureRequest) -> list[torch.device]:
    """Two devices of one type: simulated ones, or with `-m multi_gpu` GPUs."""
    if request.param == "cuda":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA GPUs")
        return [torch.device("cuda", i) for i in range(2)]
    simulated = request.config.stash[_simulated]
    if isinstance(simulated, str):
        pytest.fail(simulated, pytrace=False)
    return simulated


@pytest.fixture(autouse=True)
def _own_seed_and_no_leaked_device(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    if torch.accelerator.device_count() == 0:
        yield
        return
    before = torch.accelerator.current_device_index()
    yield
    after = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(before)
    assert after == before, f"the test left device {after} current, it began on {before}"


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """No Accelerator yet, and none left behind: its state belongs to the process."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()
