"""AllGather, ReduceScatter and AllReduce: over two processes, and alone."""

import copy
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import quaver as qv
from quaver import ops
from quaver.testing import simulated_devices
from tests.integration.helpers import equal
from tests.samples import normal

WORLD = 2
COLLECTIVES = (ops.AllGather, ops.ReduceScatter, ops.AllReduce)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_alone_it_is_the_identity(kind: type) -> None:
    x = normal(3, 4)
    assert ops.Sequential(kind())(x) is x
    with pytest.raises(qv.QuaverError, match="at least one dimension"):
        kind()(torch.tensor(1.0))


def test_the_rows_must_go_into_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(qv.QuaverError, match="a multiple of the 2 ranks, not 3"):
        ops.ReduceScatter()(normal(3, 4))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=WORLD)
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def _whole(name: str, *shape: int) -> torch.Tensor:
    """Small integers, whose sums are exact in any order."""
    return (normal(*shape, name=name) * 2).round()


def _rank(rank: int, folder: str) -> None:
    devices = simulated_devices(2)
    dist.init_process_group(
        "cpu:gloo,sim:gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for device in (torch.device("cpu"), devices[1]):
        _check(rank, device)
    group = dist.new_group([0, 1])
    operation = ops.AllReduce(group)
    assert copy.deepcopy(operation).process_group is group
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


def _check(rank: int, device: torch.device) -> None:
    """A tensor-parallel MLP: its first weight split by rows, its second by columns."""
    w1, w2 = _whole("w1", 12, 8), _whole("w2", 8, 12)
    xs, grad = _whole("x", 6, 8), _whole("grad", 6, 8)
    x0, full1, full2 = (t.clone().requires_grad_() for t in (xs, w1, w2))
    expected = torch.relu(x0 @ full1.t()) @ full2.t()
    expected.backward(grad)

    def parts(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return t.chunk(WORLD, dim)[rank]

    for sequence in (True, False):
        first, second = ops.BasicLinear(8, 6, device=device), ops.BasicLinear(6, 8, device=device)
        first.weight.data.copy_(parts(w1))
        second.weight.data.copy_(parts(w2, 1))
        before = [ops.AllGather()] if sequence else []
        after = ops.ReduceScatter() if sequence else ops.AllReduce()
        model = ops.Sequential(*before, first, ops.ReLU(), second, after)
        x = (parts(xs) if sequence else xs).to(device).clone().requires_grad_()
        y = model(x)
        assert y.device == device
        y.backward((parts(grad) if sequence else grad).to(device))
        dx = x.grad
        if sequence:
            assert equal(y, parts(expected))
            assert equal(dx, parts(x0.grad))
        else:  # each rank has the part of dx that went through its shard
            assert equal(y, expected)
            dist.all_reduce(dx)
            assert equal(dx, x0.grad)
        assert equal(first.weight.grad, parts(full1.grad))
        assert equal(second.weight.grad, parts(full2.grad, 1))
        assert pickle.loads(pickle.dumps(model[-1])).process_group is None
