"""Regions and current devices belong to a thread: two threads never mix."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.devices import current_device
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, scaling, train_step

STEPS = 6
Devices = list[torch.device]
Results = list[dict[str, torch.Tensor]]


def model_on(device: torch.device) -> nn.Sequential:
    return nn.Sequential(qv.Linear(16, 32, device=device), qv.Linear(32, 16, device=device))


def in_threads(*jobs: Callable[[], Results]) -> list[Results]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(job) for job in jobs]]


class InTurns(nn.Module):
    """Waits inside of the region until the other thread is in its own: the two always overlap."""

    def __init__(self, model: nn.Module, barrier: threading.Barrier) -> None:
        super().__init__()
        self.model = model
        self.barrier = barrier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.barrier.wait(30)
        y = self.model(x)
        self.barrier.wait(30)
        return y


RECIPES = {
    "two recipes": (DelayedScaling(amax_history_len=2), DelayedScaling(amax_history_len=4)),
    "equal recipes": (DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=3)),
}


@pytest.mark.parametrize("same_device", [False, True])
@pytest.mark.parametrize("case", RECIPES)
def test_two_threads_equal_two_sequential_runs(
    devices: Devices, case: str, same_device: bool
) -> None:
    places = [devices[1], devices[1] if same_device else devices[0]]
    models = [model_on(device) for device in places]
    twins = [copy.deepcopy(model) for model in models]
    inputs = [[torch.randn(4, 16) * 4.0**i for _ in range(STEPS)] for i in range(2)]
    grads = [torch.randn(4, 16), torch.randn(4, 16) * 3]
    barrier = threading.Barrier(2)

    def job(i: int, model: nn.Module) -> Results:
        recipe = RECIPES[case][i]
        results = [train_step(model, x.to(places[i]), grads[i], recipe) for x in inputs[i]]
        assert current_device(devices[0].type) == devices[0]
        return results

    with launches() as log:
        together = in_threads(*(lambda i=i: job(i, InTurns(models[i], barrier)) for i in range(2)))
    assert_guarded(log, places, least=2 * STEPS * 10)
    for i, twin in enumerate(twins):
        alone = job(i, twin)
        for mine, expected in zip(together[i], alone, strict=True):
            assert_same({k.removeprefix("model."): v for k, v in mine.items()}, expected)
        assert_same(scaling(models[i]), scaling(twin))
        history = twin[0].recipe_states["forward"].amax_history
        assert history.shape[0] == RECIPES[case][i].amax_history_len


def test_a_region_does_not_reach_another_thread(devices: Devices) -> None:
    model = model_on(devices[1])
    x = torch.randn(4, 16, device=devices[1])
    with qv.autocast(), launches() as log, ThreadPoolExecutor(1) as pool:
        pool.submit(model, x).result(timeout=60)
        assert log == []
        model(x)
        assert len(log) > 0


def test_a_backward_on_another_thread_updates_the_scales(devices: Devices) -> None:
    """Gradients may be asked for elsewhere than where the forward ran."""
    recipe = DelayedScaling(amax_history_len=2)
    model = model_on(devices[1])
    twin = copy.deepcopy(model)
    x, grad = torch.randn(4, 16), torch.randn(4, 16)
    for _ in range(2):
        expected = train_step(twin, x.to(devices[1]), grad, recipe)
        model.zero_grad()
        with qv.autocast(recipe=recipe):
            y = model(x.to(devices[1]))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(y.backward, grad.to(devices[1])).result(timeout=60)
        assert_same({"y": y.detach().cpu()}, {"y": expected["y"]})
    assert_same(scaling(model), scaling(twin))
    assert model[0].recipe_states["backward"].updates == 2
