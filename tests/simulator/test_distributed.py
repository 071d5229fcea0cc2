"""Collectives over gloo: two processes, each with two devices."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from quaver.simulator import load

WORLD = 2


def test_collectives_over_two_processes_of_two_devices(tmp_path: Path) -> None:
    mp.spawn(_run, args=(str(tmp_path / "store"),), nprocs=WORLD)


def _run(rank: int, store: str) -> None:
    devices = load(2)
    dist.init_process_group(
        "cpu:gloo,sim:gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for device in devices:
        _check_collectives(rank, device)
    _check_data_parallel(rank, devices[1])
    dist.destroy_process_group()


def _check_collectives(rank: int, device: torch.device) -> None:
    x = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(x)
    assert x.tolist() == [3, 3, 3]
    assert x.device == device
    dist.all_reduce(x.mul_(rank + 1), op=dist.ReduceOp.MAX, async_op=True).wait()
    assert x.tolist() == [6, 6, 6]

    y = torch.full((2,), rank, device=device)
    dist.broadcast(y, src=1)
    assert y.tolist() == [1, 1]

    parts = [torch.empty(1, device=device) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((1,), float(rank), device=device))
    assert [p.item() for p in parts] == [0, 1]

    whole = torch.arange(4.0, device=device)
    mine = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(mine, whole)
    assert mine.tolist() == [4.0 * rank, 4.0 * rank + 2]

    z = torch.full((1,), float(rank), device=device)
    if rank == 0:
        dist.send(z, dst=1)
    else:
        dist.recv(z, src=0)
    assert z.item() == 0
    dist.barrier()


def _check_data_parallel(rank: int, device: torch.device) -> None:
    model = nn.Linear(2, 1, bias=False).to(device)
    replica = nn.parallel.DistributedDataParallel(model)
    replica(torch.full((1, 2), float(rank), device=device)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    assert model.weight.grad.device == device
