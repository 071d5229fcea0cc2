"""What our modules promise to the frameworks around them, and the faults that people report most.

The promises, and where else they are tested:

1. kernels run under their tensors' device, caches are keyed by device:
   `tests/kernels/test_door.py`, `tests/devices/test_caches.py`,
   `tests/integration/test_multi_device.py`, and with the guards taken out
   `tests/integration/test_mutations.py`;
2. state is made on the module's device and follows it; copies, pickles, meta:
   `tests/integration/test_placement.py`; shards: `tests/tensors/test_sharding.py`;
3. extra state: `tests/scaling/test_extra_state.py`, `tests/integration/test_checkpoints.py`;
4. devices, contexts and meta: `tests/integration/test_placement.py`, `tests/nn/test_init.py`;
5. known as nn.Linear: here, and `tests/integrations/test_peft.py`;
6. nothing silent: `tests/conversion/test_parents.py`, `tests/conversion/test_status.py`, and here.

The faults: the wrong device and state left behind: as 1 and 2. One model changing another:
`tests/integration/test_states.py`, `tests/scaling/test_registry.py`. Extra state: as 3. Shapes that
are not divisible, zero blocks: `tests/integration/test_edge_values.py`,
`tests/integration/test_recipes_edges.py`. FP8 weights under FSDP2: as 2. Hardware that lacks FP8:
`tests/devices/test_capability.py`. Users who patch workspaces and state a GPU at a time:
`tests/integrations/transformer_engine/test_frameworks.py`. Host cost on small layers (its time on
a GPU: `benchmarks/linear.py --host-only`), builds that fail, memory, and training that is not FP8
in truth: here.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quaver as qv
from quaver.nn import QuantizedModule
from quaver.recipe import DelayedScaling, named_recipe
from quaver.testing import launches
from tests.conversion.models import Mlp
from tests.integration.helpers import equal, quantized_modules, scaling
from tests.integrations.transformers.folders import NAMES

Devices = list[torch.device]
NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".pyx", ".rs", ".so")


def test_hooks_ask_for_extra_state_often_and_nothing_comes_of_it(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate looks at each module's `state_dict` to see whether it needs a hook."""
    model = Mlp()
    qv.convert(model)
    for layer in quantized_modules(model).values():
        layer.recipe_states.clear()
    asked: list[Any] = []
    get = QuantizedModule.get_extra_state

    def counted(self: QuantizedModule) -> torch.Tensor:
        asked.append(self)
        return get(self)

    monkeypatch.setattr(QuantizedModule, "get_extra_state", counted)
    with launches() as log:
        dispatch_model(model, {"fc1": devices[0], "fc2": devices[1], "lm_head": devices[0]})
    assert set(asked) == set(quantized_modules(model).values())
    assert log == []
    assert scaling(model) == {}


@pytest.mark.parametrize("recipe", NAMES)
def test_a_layer_is_made_without_reading_a_value(recipe: str) -> None:
    """Tensors that are fake or on meta have none, and `.item()` on one raises."""
    chosen = named_recipe(recipe)
    with FakeTensorMode():
        layer = qv.Linear(32, 32, recipe=chosen)
        qv.convert(nn.Sequential(nn.Linear(32, 32)), chosen)
    assert layer.weight.shape == (32, 32)
    with torch.device("meta"), qv.quantized_model_init(recipe=chosen):
        layer = qv.Linear(32, 32, recipe=chosen)
    assert layer.weight.device.type == "meta"
    assert layer.weight.shape == (32, 32)


@pytest.mark.parametrize("recipe", [None, *NAMES])
def test_parameters_are_drawn_anew_the_same_way_each_time(
    devices: Devices, recipe: str | None
) -> None:
    chosen = None if recipe is None else named_recipe(recipe)
    with qv.quantized_model_init(enabled=chosen is not None, recipe=chosen):
        layer = qv.Linear(32, 32, device=devices[1])
    values = []
    for _ in range(2):
        torch.manual_seed(5)
        layer.reset_parameters()
        weight = layer.weight.detach()
        values.append(weight.clone() if chosen is None else weight.dequantize())
        assert layer.weight.device == devices[1]
    assert equal(*values)


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_layer_is_torchs_linear_to_whoever_asks(weights: str) -> None:
    model = Mlp()
    qv.convert(model, named_recipe("current"), weights=weights)
    for layer in (model.fc1, qv.Linear(16, 32)):
        assert isinstance(layer, nn.Linear)
        assert (layer.in_features, layer.out_features) == (16, 32)
        assert layer.weight.shape == (32, 16)
        assert set(dict(layer.named_parameters())) == {"weight", "bias"}
        assert dict(layer.named_buffers()) == {}
        assert list(layer._buffers) == []
        assert layer.weight.dtype == torch.float32


def test_a_new_buffer_is_a_buffer_still() -> None:
    layer = qv.Linear(16, 16)
    layer.register_buffer("table", torch.ones(2))
    layer.extra = nn.Parameter(torch.ones(2))
    assert list(dict(layer.named_buffers())) == ["table"]
    assert equal(layer.state_dict()["table"], torch.ones(2))
    layer.to(torch.float64)
    assert layer.table.dtype == torch.float64
    layer.table = torch.zeros(2)
    assert equal(layer.table, torch.zeros(2))
    assert list(layer._buffers.copy()) == ["table"]
    layer.table = nn.Parameter(torch.ones(2))
    assert dict(layer.named_buffers()) == {}


@pytest.mark.parametrize("recipe", NAMES)
def test_quantized_weights_save_memory_and_use_costs_none(recipe: str) -> None:
    """No transpose and no copy in high precision stays behind."""
    model = Mlp(64)
    plain = sum(layer.weight.numel() * 4 for layer in (model.fc1, model.fc2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    qv.convert(model, named_recipe(recipe), weights="quantize")
    before = qv.status(model).weight_bytes
    biases = sum(layer.bias.numel() * 4 for layer in (model.fc1, model.fc2))
    assert before - biases <= plain * (0.15 if recipe == "nvfp4" else 0.27)
    x = torch.randn(4, 64, requires_grad=True)
    with qv.autocast(enabled=False, calibrating=True, recipe=named_recipe(recipe)):
        model(x)
    model(x).sum().backward()
    assert qv.status(model).weight_bytes == before
    assert all(layer._weight_cache is None for layer in quantized_modules(model).values())


@pytest.mark.parametrize("recipe", NAMES)
def test_a_forward_starts_one_kernel_an_operand_and_one_for_the_product(recipe: str) -> None:
    """On small layers it is the host's work that counts."""
    chosen = named_recipe(recipe)
    layer, x = qv.Linear(32, 32, bias=False, recipe=chosen).eval(), torch.randn(32, 32)
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=chosen):
        layer(x)
    with torch.no_grad(), qv.autocast(recipe=chosen):
        layer(x)
        with launches() as log:
            layer(x)
        with launches() as first:
            layer(x, is_first_microbatch=True)
        with launches() as later:
            layer(x, is_first_microbatch=False)
    kernels = [launch.kernel for launch in log]
    assert len(kernels) == 3
    assert kernels[:2] == [kernels[0]] * 2
    assert kernels[2] == "scaled_mm"
    assert len(first) == 3
    assert [launch.kernel for launch in later] == kernels[1:]  # the weight was kept


def test_nothing_is_compiled_at_installation() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert [name.partition(">")[0] for name in project["build-system"]["requires"]] == [
        "setuptools"
    ]
    assert "ext-modules" not in project["tool"].get("setuptools", {})
    assert not (root / "setup.py").exists()
    native = {p.parent.name for p in (root / "src").rglob("*") if p.suffix in NATIVE}
    assert native <= {"csrc"}  # the simulator's, which is compiled when it is first asked for


@pytest.mark.parametrize("recipe", NAMES)
def test_training_is_in_fp8_in_truth(recipe: str) -> None:
    model = Mlp()
    qv.convert(model, named_recipe(recipe))
    x = torch.randn(4, 16, requires_grad=True)
    with launches() as log:
        model(x).square().sum().backward()
    assert [launch.kernel for launch in log].count("scaled_mm") == 2 * 3
    exact = Mlp()
    exact.load_state_dict({k: v for k, v in model.state_dict().items() if "_extra" not in k})
    exact(x).square().sum().backward()
    assert not equal(model.fc1.weight.grad, exact.fc1.weight.grad)


def test_what_runs_differently_than_asked_is_said() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "odd": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4)}
    )
    model["odd"].forward = lambda x: x
    report = qv.convert(model, DelayedScaling())
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert set(reasons) == {"odd", "lm_head"}
    assert "forward is replaced" in reasons["odd"]
    status = qv.status(model)
    assert (len(status.layers), status.other_linears) == (1, 2)
    assert "emulated" in status.layers[0].path
    with pytest.warns(UserWarning, match="no scales yet in a"), torch.no_grad():
        model["a"](torch.ones(1, 4))
