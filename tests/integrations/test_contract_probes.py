"""What was seen to break under other frameworks: each probe, and where it is tested.

Tested elsewhere, and not again here:

- plain tensor attributes after `.to`, `to_empty`, meta: `tests/integration/test_placement.py`
  (test_states_follow_a_move, test_a_state_on_meta_is_made_anew_after_to_empty,
  test_a_module_made_on_meta_finds_its_device);
- attributes of a parameter after a hook's move: there, too
  (test_a_parameter_that_a_hook_moves_is_noticed);
- extra state as BytesIO, None or dict; `torch.load(weights_only=True)`; a checkpoint of nn.Linear,
  strict: `tests/integration/test_checkpoints.py`, `tests/scaling/test_extra_state.py`;
- `load_checkpoint_and_dispatch` of a checkpoint with `_extra_state`, scales and disk:
  `tests/integrations/test_accelerate.py`;
- peft's LoRA and `merge`: `tests/integrations/test_peft.py`;
- quantized weights under FSDP2 over two processes: `tests/tensors/test_sharding.py`;
- E8M0 scales in safetensors: `tests/integrations/transformers/test_saving.py`, and in files that
  transformers writes and reads: `tests/checkpoint/test_transformers.py`;
- pickles under `_extra_state` in safetensors files: `tests/checkpoint/test_states.py`.
"""

import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quaver as qv
from quaver.errors import CheckpointError
from quaver.recipe import DelayedScaling, named_recipe
from quaver.testing import launches
from tests.integration.helpers import assert_same, equal, scaling, train_step
from tests.integration.recipes import parts

RECIPE = DelayedScaling(amax_history_len=4)

Devices = list[torch.device]


def converted(recipe: str, weights: str, device: torch.device | str = "cpu") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 48, device=device))
    qv.convert(model, named_recipe(recipe), weights=weights)
    return model


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8", "nvfp4"])
def test_a_layer_can_be_made_without_memory(recipe: str | None) -> None:
    """A parameter with attributes of its own cannot be registered under `init_empty_weights`."""
    chosen = None if recipe is None else named_recipe(recipe)
    with init_empty_weights(), qv.quantized_model_init(enabled=chosen is not None, recipe=chosen):
        layer = qv.Linear(16, 16)
    assert layer.weight.device.type == "meta"
    assert isinstance(layer.weight, qv.tensors.QuantizedTensor) == (chosen is not None)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_a_change_of_dtype_keeps_payload_and_scales(recipe: str) -> None:
    """`.to(dtype)`, or a loader's `value.to(parameter.dtype)`, casts float8 payloads and scales."""
    model = converted(recipe, "quantize")
    before = {name: part.clone() for name, part in parts(model[0].weight).items()}
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16
    assert_same(parts(model[0].weight), before)
    value = model[0].weight.detach()
    set_module_tensor_to_device(model, "0.weight", "cpu", value=value, dtype=torch.float32)
    assert_same(parts(model[0].weight), before)
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_float8_value_is_never_cast_into_a_plain_parameter_unseen(recipe: str) -> None:
    """Where a quantized value goes to a plain layer, its values do, and not its bytes."""
    weight = converted(recipe, "quantize")[0].weight.detach()
    plain = nn.Linear(32, 48)
    plain.load_state_dict({"weight": weight, "bias": torch.zeros(48)})
    assert equal(plain.weight, weight.dequantize())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_data_parallel_over_gloo(weights: str) -> None:
    model = converted("current", weights)
    model.append(nn.Linear(48, 4))
    model[0].weight.requires_grad_(weights == "keep")
    before = model[0].weight.detach().clone()
    replica = DistributedDataParallel(model)
    step = 0.0 if weights == "keep" else 2**-9  # quantized weights are sent as values
    assert (model[0].weight - before).abs().max() <= step * before.abs().max()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 32)
    for each in (replica, twin):
        each(x).square().sum().backward()
    trained = [(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    assert sum(mine is not None for mine, _ in trained) == (4 if weights == "keep" else 3)
    assert all(equal(mine, theirs) for mine, theirs in trained if mine is not None)
    assert not list(model.buffers())  # scaling state is no buffer, to be sent in each forward


def _rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    for weights in ("keep", "quantize"):
        _check_that_ranks_agree(rank, weights)
    dist.barrier()
    dist.destroy_process_group()  # after the replicas are gone, which would wait for it


def _check_that_ranks_agree(rank: int, weights: str) -> None:
    torch.manual_seed(rank)
    model = converted("mxfp8", weights)
    model[0].weight.requires_grad_(weights == "keep")
    replica = DistributedDataParallel(model)
    replica(torch.randn(4, 32)).sum().backward()
    weight = model[0].weight.detach()
    values = weight if weights == "keep" else weight.dequantize()
    for mine in (values, model[0].bias.grad):
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine.contiguous())
        assert equal(*both)


@pytest.mark.slow
def test_data_parallel_over_two_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("microbatches", [False, True])
def test_fsdp2_sees_that_a_weight_has_changed(microbatches: bool) -> None:
    """Its unsharded parameter is one object for ever, whose version stays 0."""
    model = nn.Sequential(qv.Linear(32, 48, recipe=RECIPE))
    twin = copy.deepcopy(model)
    fully_shard(model[0] if microbatches else model, mesh=init_device_mesh("cpu", (1,)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    for _ in range(3):
        x = torch.randn(4, 32)
        outputs = []
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            for first in (True, False) if microbatches else (None,):
                layer = each if first is None else each[0]
                options = {} if first is None else {"is_first_microbatch": first}
                with qv.autocast(recipe=RECIPE):
                    y = layer(x, **options)
                y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
        assert equal(*outputs)
    assert_same(scaling(model), scaling(twin))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("length", [2, 16, 1024])
def test_a_distributed_checkpoint_takes_another_history_length(tmp_path: Path, length: int) -> None:
    """Extra state that grows with the history is a "Size mismatch" there."""
    source = qv.Linear(16, 16, recipe=RECIPE)
    train_step(source, torch.full((4, 16), 2.0), torch.ones(4, 16), RECIPE)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    target = qv.Linear(16, 16, recipe=DelayedScaling(amax_history_len=length))
    state = target.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    target.load_state_dict(state)
    assert equal(target.weight, source.weight)
    forward = target.recipe_states["forward"]
    assert forward.amax_history.shape == (length, 3)
    assert forward.amax_history[-1, 0] == 2
    assert equal(forward.scale, source.recipe_states["forward"].scale)


class Reader(nn.Module):
    """A parent that computes with its child's weight, as fused modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight) + self.inner(x)


def test_a_parent_that_reads_a_weight_works_under_offload_and_is_reported() -> None:
    model = Reader()
    x = torch.randn(4, 16)
    report = qv.convert(model, named_recipe("current"), weights="quantize")
    assert [layer.name for layer in report.bypassed] == ["inner"]
    assert [layer.weights for layer in report.converted] == ["kept"]
    expected = model(x)
    cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=["Reader"])
    assert model.inner.weight.device.type == "meta"
    with torch.no_grad(), launches() as log:
        assert equal(model(x), expected)
    assert [launch.kernel for launch in log].count("scaled_mm") == 1


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8", "nvfp4"])
def test_safetensors_refuses_a_quantized_weight_and_names_the_ways_out(
    tmp_path: Path, recipe: str
) -> None:
    """A wrapper's own memory is nothing, so that a writer who asked for it would write that."""
    model = converted(recipe, "quantize")
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for write in (
        lambda: safetensors.torch.save_file(state, tmp_path / "model.safetensors"),
        lambda: safetensors.torch.save(state),
    ):
        with pytest.raises(CheckpointError, match=r"save_model .* QuaverConfig .* convert_back"):
            write()
    assert not list(tmp_path.iterdir())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin = converted(recipe, "quantize")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_same(parts(twin[0].weight), parts(model[0].weight))


def test_the_address_of_a_quantized_weight_is_its_payloads() -> None:
    """`data_ptr() == 0` for all would make accelerate take all for tied."""
    layers = [converted("current", "quantize")[0] for _ in range(2)]
    addresses = {layer.weight.data_ptr() for layer in layers}
    assert len(addresses) == 2
    assert 0 not in addresses
