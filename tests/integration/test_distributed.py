"""The amax reduction across processes, over states on several devices."""

import copy
import gc
import hashlib
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import quaver as qv
from quaver.devices import current_device
from quaver.recipe import DelayedScaling
from quaver.testing import launches, simulated_devices
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    scaling,
    train_step,
)
from tests.integration.test_multi_device import Interleaved

Devices = list[torch.device]


class Reductions:
    """Stands for a process group of two ranks: keeps what each all-reduce gets.

    `theirs` is what the other rank has in its buffer: a number for all entries.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[torch.Tensor] = []
        self.groups: list[Any] = []
        self.current: list[torch.device] = []
        self.theirs = 0.0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, buffer: torch.Tensor, op: Any, group: Any = None) -> None:
        assert op == dist.ReduceOp.MAX
        self.buffers.append(buffer.clone())
        self.groups.append(group)
        self.current.append(current_device(buffer.device.type))
        buffer.clamp_(min=self.theirs)


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> Reductions:
    return Reductions(monkeypatch)


def own_recipe(length: int, **options: Any) -> DelayedScaling:
    """A key of its own, since a registry's slots are never given up."""
    return DelayedScaling(amax_history_len=length, **options)


def amaxes(model: Interleaved, x: torch.Tensor) -> list[float]:
    """What the forward of `model` has in its slots, from what its layers recorded."""
    histories = [layer.recipe_states["forward"].amax_history[-1] for layer in model.layers]
    return torch.cat([history.cpu() for history in histories]).tolist()


def test_one_buffer_in_registration_order_on_the_first_registered_device(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = own_recipe(101)
    split = Interleaved([devices[1], devices[0], devices[1]])
    local = copy.deepcopy(split)
    steps = [(torch.randn(4, 32) * 2.0**i, torch.randn(4, 32)) for i in range(4)]
    expected = [(train_step(local, x, grad, recipe), scaling(local)) for x, grad in steps]

    reductions = Reductions(monkeypatch)
    for (x, grad), (results, states) in zip(steps, expected, strict=True):
        reductions.buffers.clear()
        with launches() as log:
            assert_same(train_step(split, x, grad, recipe), results)
        assert_guarded(log, devices, least=18)
        assert_same(scaling(split), states)
        forward, backward = reductions.buffers
        assert forward.device == backward.device == devices[1]
        assert forward.tolist() == amaxes(split, x)
        states_backward = [layer.recipe_states["backward"] for layer in split.layers]
        newest = [state.amax_history[-1].cpu() for state in states_backward]
        assert backward.tolist() == torch.cat(newest).tolist()
    assert set(reductions.current) == {devices[1]}
    assert current_device(devices[0].type) == devices[0]


def test_the_other_ranks_amaxes_count(devices: Devices, reductions: Reductions) -> None:
    recipe = own_recipe(102)
    layers = [qv.Linear(16, 16, device=device) for device in devices]
    reductions.theirs = 7.0
    with qv.autocast(recipe=recipe):
        for layer, device in zip(layers, devices, strict=True):
            layer(torch.full((2, 16), 2.0, device=device))
    for layer, device in zip(layers, devices, strict=True):
        state = layer.recipe_states["forward"]
        assert state.device == device
        assert state.scale.tolist() == [448 / 7] * 3
        assert state.amax_history[-1].tolist() == [7.0] * 3


def test_unused_and_dead_slots_are_zeros_and_keep_their_place(
    devices: Devices, reductions: Reductions
) -> None:
    recipe = own_recipe(103)
    layers = [qv.Linear(16, 16, device=devices[i]) for i in (0, 1, 0)]

    def run(*which: int) -> list[float]:
        reductions.buffers.clear()
        with qv.autocast(recipe=recipe):
            for i in which:
                layer = layers[i]
                layer(torch.full((2, 16), 1.0 + i, device=layer.weight.device))
        (buffer,) = reductions.buffers
        assert buffer.shape == (9,)
        return buffer[::3].tolist()

    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(0.5)
    assert run(0, 1, 2) == [1, 2, 3]
    assert run(1) == [0, 2, 0]
    assert run(2, 0) == [1, 0, 3]  # the order of registration, not of use
    layers[0] = layers[1]
    gc.collect()
    assert run(1, 2) == [0, 2, 3]
    reductions.theirs = 8.0  # another rank used all of them
    run(2)
    assert layers[1].recipe_states["forward"].scale[0].item() == 448 / 8


def test_a_rank_without_any_use_takes_part(devices: Devices, reductions: Reductions) -> None:
    recipe = own_recipe(104)
    layer = qv.Linear(16, 16, device=devices[1])
    with qv.autocast(recipe=recipe):
        layer(torch.ones(2, 16, device=devices[1]))
    with qv.autocast(recipe=recipe):
        pass
    first, second = reductions.buffers
    assert first.shape == second.shape == (3,)
    assert not second.any()


def test_groups_and_recipes_are_reduced_apart(devices: Devices, reductions: Reductions) -> None:
    recipe, group = own_recipe(105), object()
    layers = [qv.Linear(16, 16, device=device) for device in devices]
    with qv.autocast(recipe=recipe, amax_reduction_group=group):
        layers[0](torch.ones(2, 16, device=devices[0]))
        with qv.autocast(recipe=own_recipe(106)):
            layers[1](torch.ones(2, 16, device=devices[1]))
    assert [buffer.numel() for buffer in reductions.buffers] == [3, 3]
    assert reductions.groups == [group, None]
    assert [buffer.device for buffer in reductions.buffers] == devices


def test_without_reduce_amax_there_is_no_collective(
    devices: Devices, reductions: Reductions
) -> None:
    layer = qv.Linear(16, 16, device=devices[1])
    recipe = own_recipe(107, reduce_amax=False)
    train_step(layer, torch.ones(2, 16, device=devices[1]), torch.ones(2, 16), recipe)
    assert reductions.buffers == []
    assert layer.recipe_states["forward"].scale[0].item() == 448


def test_backward_is_reduced_once_for_all_devices(devices: Devices, reductions: Reductions) -> None:
    recipe = own_recipe(108)
    layers = [qv.Linear(16, 16, device=device) for device in devices]
    with qv.autocast(recipe=recipe):
        ys = [layer(torch.ones(2, 16, device=layer.weight.device)) for layer in layers]
    reductions.buffers.clear()
    (ys[0].sum() * 3 + ys[1].sum().to(devices[0])).backward()
    (buffer,) = reductions.buffers
    assert buffer.tolist() == [3, 0, 1, 0]
    scales = [layer.recipe_states["backward"].scale[0] for layer in layers]
    assert equal(scales[0], torch.tensor(57344.0) / 3)
    assert equal(scales[1], torch.tensor(57344.0))
    assert [scale.device for scale in scales] == devices


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
def test_what_only_infers_on_one_rank_takes_no_part(
    devices: Devices, reductions: Reductions
) -> None:
    """A rank that evaluates alone, modules in any order or a copy, has the buffer of the others."""
    recipe = own_recipe(109)
    first, second = (qv.Linear(16, 16, device=device) for device in devices)
    average = copy.deepcopy(first)
    with torch.no_grad():
        for layer, value in ((second, 90.0), (average, 70.0)):
            with qv.autocast(recipe=recipe):
                layer(torch.full((2, 16), value, device=layer.weight.device))
            reductions.buffers.clear()
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.fill_(0.5)
    for _ in range(2):
        reductions.buffers.clear()
        with qv.autocast(recipe=recipe):
            for layer, value in ((first, 1.0), (second, 2.0)):
                layer(torch.full((2, 16), value, device=layer.weight.device))
        (buffer,) = reductions.buffers
        assert buffer.tolist() == [1.0, 0.5, 0.0, 2.0, 0.5, 0.0]
        with torch.no_grad(), qv.autocast(recipe=recipe):
            average(torch.ones(2, 16, device=devices[0]))
    scales = [layer.recipe_states["forward"].scale[0].item() for layer in (first, second)]
    assert scales == [448.0, 224.0]


@pytest.mark.parametrize("grad", [False, True])
def test_what_was_calibrated_is_reduced(
    devices: Devices, reductions: Reductions, grad: bool
) -> None:
    recipe, layer = own_recipe(110 + grad), qv.Linear(16, 16, device=devices[1])
    reductions.theirs = 7.0
    region = qv.autocast(enabled=False, calibrating=True, recipe=recipe)
    with torch.set_grad_enabled(grad), region:
        layer(torch.full((2, 16), 2.0, device=devices[1]))
    assert [buffer[0].item() for buffer in reductions.buffers] == [2.0]
    assert layer.recipe_states["forward"].scale[0].item() == 448 / 7


# ---- several processes


ITERATIONS = 10


class Ranks(NamedTuple):
    """Processes, and where each of them has its layers.

    Args:
        backend: of the process group.
        places: for each rank the devices of the three layers. With one rank, it sees the batches
            that the two see otherwise.
    """

    backend: str
    places: list[str]


GLOO, NCCL = "cpu:gloo,sim:gloo", "nccl"
RANKS = {
    "two devices a rank": Ranks(GLOO, ["sim:1 sim:0 sim:1"] * 2),
    "one device a rank": Ranks(GLOO, ["sim:0 sim:0 sim:0", "sim:1 sim:1 sim:1"]),
    "one rank of two devices": Ranks(GLOO, ["sim:1 sim:0 sim:1"]),
    "one GPU a rank": Ranks(NCCL, ["cuda:0 cuda:0 cuda:0", "cuda:1 cuda:1 cuda:1"]),
    "two GPUs a rank": Ranks(NCCL, ["cuda:1 cuda:0 cuda:1", "cuda:0 cuda:1 cuda:0"]),
    "one rank of two GPUs": Ranks(NCCL, ["cuda:1 cuda:0 cuda:1"]),
}
MARKS = dict.fromkeys(("one device a rank", "one rank of two devices"), pytest.mark.slow)
MARKS |= {name: pytest.mark.multi_gpu for name, ranks in RANKS.items() if ranks.backend == NCCL}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in RANKS])
def test_all_ranks_end_with_the_states_of_one_process(tmp_path: Path, name: str) -> None:
    ranks = RANKS[name]
    if ranks.backend == NCCL and (torch.cuda.device_count() < 2 or not dist.is_nccl_available()):
        pytest.skip("needs two CUDA GPUs and NCCL")
    mp.spawn(_rank, args=(str(tmp_path), ranks), nprocs=len(ranks.places))
    hashes = {(tmp_path / f"hash{rank}").read_text() for rank in range(len(ranks.places))}
    assert hashes == {(tmp_path / "local").read_text()}


def _rank(rank: int, folder: str, ranks: Ranks) -> None:
    """Train on the rank's batches; rank 0 then does so in one process without a group."""
    if ranks.backend == GLOO:
        simulated_devices(2)
    places = [torch.device(place) for place in ranks.places[rank].split()]
    dist.init_process_group(
        ranks.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(ranks.places),
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    whole = Interleaved([torch.device("cpu")] * 3)
    model, alone = (copy.deepcopy(whole) for _ in range(2))
    _place(model, places)
    batches = [[torch.randn(4, 32) * (r + i + 1) for r in range(2)] for i in range(ITERATIONS)]
    if rank == 0:
        _infer_alone(model, own_recipe(5))
    for i, batch in enumerate(batches):
        _iterate(model, batch if len(ranks.places) == 1 else [batch[rank]], own_recipe(5))
        if rank == i == 1:
            _infer_alone(model, own_recipe(5))
    assert {layer.recipe_states["backward"].updates for layer in model.layers} == {ITERATIONS}
    for layer, place in zip(model.layers, places, strict=True):
        assert_state_devices(layer, place)
    assert current_device(places[0].type).index == 0
    Path(folder, f"hash{rank}").write_text(_hash(model))
    dist.barrier(device_ids=[places[0].index] if ranks.backend == NCCL else None)
    dist.destroy_process_group()
    if rank == 0:  # what one process that sees the batches of all ranks comes to
        _place(alone, [torch.device(places[0].type, index) for index in (1, 0, 1)])
        for batch in batches:
            _iterate(alone, batch, own_recipe(5))
        Path(folder, "local").write_text(_hash(alone))


def _place(model: Interleaved, places: Devices) -> None:
    model.places = places
    for layer, place in zip(model.layers, places, strict=True):
        layer.to(place)


def _iterate(model: nn.Module, batch: list[torch.Tensor], recipe: DelayedScaling) -> None:
    with qv.autocast(recipe=recipe):
        outputs = [model(x) for x in batch]
    torch.stack([y.square().sum() for y in outputs]).sum().backward()


def _infer_alone(model: Interleaved, recipe: DelayedScaling) -> None:
    """As one rank evaluates: a layer out of turn, and a copy."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no scales yet
        layer = model.layers[-1]
        for run in (layer, copy.deepcopy(layer)):
            with qv.autocast(recipe=recipe):
                run(torch.full((2, layer.in_features), 1e4, device=layer.weight.device))


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(scaling(model).items()):
        assert tensor.isfinite().all()
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
