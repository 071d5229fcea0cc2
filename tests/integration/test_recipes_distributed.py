"""Current scaling with amaxes reduced over ranks."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import quaver as qv
from quaver.kernels import current_cast
from quaver.recipe import Float8CurrentScaling
from quaver.testing import launches, simulated_devices
from tests.integration.helpers import assert_guarded, equal, linear_like, train_step
from tests.integration.recipes import RECIPES
from tests.integration.test_distributed import Reductions, reductions

__all__ = ["reductions"]  # a fixture

Devices = list[torch.device]
REDUCED = Float8CurrentScaling(reduce_amax=True)
WORLD = 2


def test_each_tensors_amax_is_reduced_over_the_regions_group(
    devices: Devices, reductions: Reductions
) -> None:
    layer, group = qv.Linear(16, 32, device=devices[1]), object()
    x = torch.full((4, 16), 2.0, device=devices[1], requires_grad=True)
    with launches() as log, qv.autocast(recipe=REDUCED, amax_reduction_group=group):
        y = layer(x)
    y.backward(torch.full_like(y, 3.0))
    assert_guarded(log, [devices[1]])
    weight = layer.weight.detach().abs().max().item()
    assert [buffer.item() for buffer in reductions.buffers] == [2.0, weight, 3.0]
    assert reductions.groups == [group] * 3  # backward too, whose region is left
    assert {buffer.device for buffer in reductions.buffers} == {devices[1]}
    assert reductions.current == [devices[1]] * 3


def test_another_ranks_amax_decides(devices: Devices, reductions: Reductions) -> None:
    layer = qv.Linear(16, 32, device=devices[1])
    x, grad = torch.rand(4, 16, device=devices[1]), torch.rand(4, 32)
    alone = train_step(linear_like(layer, devices[1]), x, grad, Float8CurrentScaling())
    assert equal(train_step(layer, x, grad, REDUCED)["y"], alone["y"])
    reductions.theirs = 1e4
    results = train_step(layer, x, grad, REDUCED)
    limit = torch.full((1,), 1e4, device=devices[1])
    (a, _, a_inv), (b, _, b_inv) = (
        current_cast(t, torch.float8_e4m3fn, False, 0.0, limit, False)
        for t in (x, layer.weight.detach())
    )
    expected = (a.float() * a_inv) @ (b.float() * b_inv).t() + layer.bias
    assert torch.allclose(results["y"].to(devices[1]), expected, rtol=1e-5, atol=1e-5)
    assert not equal(results["y"], alone["y"])


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_no_other_recipe_reduces(devices: Devices, reductions: Reductions, name: str) -> None:
    layer = qv.Linear(16, 32, device=devices[1])
    train_step(layer, torch.rand(4, 16, device=devices[1]), torch.rand(4, 32), RECIPES[name])
    assert reductions.buffers == []


# ---- two processes


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0**rank
    x = torch.randn(4, 16, generator=generator) * scale
    return x, torch.randn(4, 32, generator=generator) / scale


def test_two_processes_quantize_with_the_largest_amax_of_both(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        saved = torch.load(tmp_path / f"results{rank}", weights_only=True)
        for name, (mine, expected) in saved.items():
            assert equal(mine, expected), (rank, name)


def _rank(rank: int, folder: str) -> None:
    device = simulated_devices(2)[1]
    torch.manual_seed(0)
    layer = qv.Linear(16, 32, device=device)
    twin = linear_like(layer, device)
    dist.init_process_group(
        "cpu:gloo,sim:gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    x, grad = batch(rank)
    results = train_step(layer, x.to(device), grad, REDUCED)
    dist.barrier()
    dist.destroy_process_group()
    # What one process makes of both batches in one: the same amaxes, the same rows.
    both = [torch.cat(parts) for parts in zip(*(batch(r) for r in range(WORLD)), strict=True)]
    whole = train_step(twin, both[0].to(device), both[1], REDUCED)
    rows = slice(4 * rank, 4 * rank + 4)
    pairs = {key: (results[key], whole[key][rows]) for key in ("y", "dx")}
    torch.save(pairs, Path(folder, f"results{rank}"))
