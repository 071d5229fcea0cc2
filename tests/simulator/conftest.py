"""Every test here has two simulated devices, and leaves the current device as it found it."""

import zlib
from collections.abc import Iterator

import pytest
import torch

from quaver.simulator import load

PLACEMENTS = [(tensor, current) for tensor in (0, 1) for current in (0, 1)]


@pytest.fixture(scope="session")
def devices() -> list[torch.device]:
    # a fixture, not an import: a run that deselects these tests must not load the simulator
    return load(2)


@pytest.fixture(autouse=True)
def _fresh_device(devices: list[torch.device], request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    torch.sim.set_device(0)
    yield
    left = torch.sim.current_device()
    torch.sim.set_device(0)
    assert left == 0, "the test left another device current"


@pytest.fixture(params=PLACEMENTS, ids=lambda p: f"tensor{p[0]}-current{p[1]}")
def placement(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """The index of a tensor's device, and that of the current device, which is set."""
    tensor, current = request.param
    torch.sim.set_device(current)
    yield tensor, current
    left = torch.sim.current_device()
    torch.sim.set_device(0)
    assert left == current, "the current device leaked"
