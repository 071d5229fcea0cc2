"""Quantized parameters under FSDP2: two processes, on the CPU, over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quaver.optim import MasterWeights
from tests.tensors.formats import QUANTIZERS, make, same_parts

SHARDED = ("float8", "block_1d", "block_2d", "mx")


def _linear(name: str) -> nn.Linear:
    linear = nn.Linear(70, 256, bias=False)
    linear.weight = nn.Parameter(make(name, 256, 70, columnwise=False))
    return linear


def _train(linear, optimizer, inputs: torch.Tensor) -> None:
    for x in inputs:
        linear(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_format(name: str, mesh) -> None:
    sharded, whole = _linear(name), _linear(name)
    fully_shard(sharded, mesh=mesh)
    local = sharded.weight.to_local()
    assert type(local.detach()) is type(whole.weight)
    assert local.shape == (128, 70)
    seen = []
    sharded.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    inputs = torch.randn(3, 4, 70, generator=torch.Generator().manual_seed(1))
    _train(sharded, _optimizer(name, sharded), inputs)
    assert same_parts(seen[0], whole.weight)
    assert type(seen[-1]) is type(whole.weight)
    assert not torch.equal(seen[2].dequantize(), seen[0].dequantize())
    if name == "float8":  # each shard has a scale of its own, and is rounded to the common one
        _train(whole, _optimizer(name, whole), inputs[:1])
        expected = whole.weight.dequantize()
        step = expected.abs().max() * 32 / 448
        assert 0 < (seen[1].dequantize() - expected).abs().max() <= 1.5 * step
    else:
        _train(whole, _optimizer(name, whole), inputs[:2])
        assert same_parts(seen[2], whole.weight)


def _optimizer(name: str, linear: nn.Linear) -> torch.optim.Optimizer:
    if name in ("float8", "mx"):
        return MasterWeights(linear.parameters(), torch.optim.AdamW, lr=0.1)
    return torch.optim.AdamW(linear.parameters(), lr=0.1)


def _check_refusals(mesh) -> None:
    linear = _linear("nvfp4")
    fully_shard(linear, mesh=mesh)
    with pytest.raises(NotImplementedError, match="shards of a NVFP4Tensor cannot be gathered"):
        linear(torch.randn(4, 70))
    cut = nn.Linear(70, 100, bias=False)
    cut.weight = nn.Parameter(QUANTIZERS["block_2d"]()(torch.randn(100, 70)))
    with pytest.raises(NotImplementedError, match="whole blocks"):
        fully_shard(cut, mesh=mesh)


def _worker(rank: int, world: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for name in SHARDED:
        _check_format(name, mesh)
    _check_refusals(mesh)
    dist.destroy_process_group()


def test_shards_are_gathered_and_trained(tmp_path) -> None:
    mp.spawn(_worker, args=(2, str(tmp_path / "rendezvous")), nprocs=2)
