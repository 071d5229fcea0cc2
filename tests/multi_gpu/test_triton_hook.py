"""With peer access on, Triton itself says under which device each kernel is launched.

The door's log alone would miss a kernel that something else launches; values alone would miss any,
since with peer access a kernel on the wrong GPU computes the right ones. On simulated devices
Triton's interpreter launches.
"""

import importlib.util
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import quaver as qv
from quaver import kernels
from quaver.kernels import use_implementation
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, train_step
from tests.integration.recipes import RECIPES
from tests.integration.test_multi_device import Interleaved
from tests.integration.triton_hook import assert_hooked, enable_peer_access, triton_launches
from tests.kernels.every import calls
from tests.samples import normal

Devices = list[torch.device]


@pytest.fixture
def peers(devices: Devices) -> Iterator[Devices]:
    """`devices`, with peer access where they can, on which the kernels are Triton's."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with use_implementation("triton"), np.errstate(all="ignore"):
        enable_peer_access(devices)
        yield devices


NAMES = [
    "amax",
    "cast",
    "cast_grad",
    "current_cast",
    "dequantize",
    "scale_update",
    "norm",
    "norm_backward",
    "norm_cast",
    "activation",
    "activation_backward",
    "activation_cast",
    "activation_backward_cast",
    "block_cast",
    "block_dequantize",
    "mx_cast",
    "mx_dequantize",
    "nvfp4_cast",
    "nvfp4_dequantize",
    "hadamard",
    "rope",
]


def test_these_are_all_kernels() -> None:
    assert {name for name, _ in calls(normal(16, 32))} | {"rope"} == set(NAMES)


def arguments(name: str, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Arguments of a kernel's calls on `device`; where they are interpreted, of one call."""
    x = normal(16, 32, device=device)
    if name == "rope":
        angles, positions = x[:, :8], torch.arange(16, device=device)
        found = iter([(x.view(16, 2, 16), angles.cos(), angles.sin(), positions, False)])
    else:
        found = (args for kind, args in calls(x) if kind == name)
    return islice(found, 1) if device.type == "sim" else found


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_under_another_device(peers: Devices, name: str) -> None:
    """Compiled at the first launch and by a prepared launcher at the next, on both in turn."""
    pairs = list(zip(*(arguments(name, device) for device in peers), strict=True))
    kernel = getattr(kernels, name)
    rounds = 1 if peers[0].type == "sim" else 2
    with launches() as log, triton_launches(log) as hooked:
        for _ in range(rounds):
            for pair in pairs:
                for args in pair[::-1]:
                    kernel(*args)
    count = rounds * 2 * len(pairs)
    assert count > 0
    assert_hooked(hooked, peers, least=count)
    assert_guarded(log, peers, least=count)


@pytest.mark.parametrize("name", RECIPES)
def test_training_on_the_device_that_is_not_current(peers: Devices, name: str) -> None:
    there = peers[1]
    layer = qv.Linear(32, 16, device=there)
    x, grad = torch.randn(16, 32, device=there), torch.randn(16, 16)
    with launches() as log, triton_launches(log) as hooked:
        for _ in range(2):
            train_step(layer, x, grad, RECIPES[name])
    assert_guarded(log, [there])
    assert_hooked(hooked, [there], least=2 * 3)


def test_layers_on_both_devices_in_turn(peers: Devices) -> None:
    model = Interleaved([peers[1], peers[0], peers[1]])
    recipe = DelayedScaling(amax_history_len=3)
    with launches() as log, triton_launches(log) as hooked:
        for _ in range(2):
            train_step(model, torch.randn(4, 32), torch.randn(4, 32), recipe)
    assert_guarded(log, peers)
    assert_hooked(hooked, peers, least=2 * (3 * 3 + 4))
