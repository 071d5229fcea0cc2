"""Code of others that takes TransformerEngine: accelerate, Lightning, subclasses of te.Linear."""

import copy
import warnings
from functools import lru_cache
from types import ModuleType

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.scaling import DelayedScalingState
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, gradients, quantized_modules

Devices = list[torch.device]


class Model(nn.Module):
    """Layers that others replace; their inputs follow them to whichever device they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.norm, self.up, torch.relu, self.down):
            x = layer(x.to(layer.weight.device)) if isinstance(layer, nn.Module) else layer(x)
        return x


# ---- accelerate


@pytest.mark.parametrize("options", [{}, {"amax_history_len": 2, "amax_compute_algo": "max"}])
def test_accelerate_trains(te: ModuleType, options: dict, fresh_accelerate, devices) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    handler = TERecipeKwargs(**options)
    accelerator = Accelerator(
        cpu=True, device_placement=False, mixed_precision="fp8", kwargs_handlers=[handler]
    )
    model = Model()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert type(model.up) is te.Linear
    assert type(model.norm) is te.LayerNorm
    assert torch.equal(model.up.weight.cpu(), twin.up.weight)
    model.down.to(devices[1])
    assert (model.up.weight.device, model.down.weight.device) == (devices[0], devices[1])
    x, losses = torch.randn(32, 16), []
    with launches() as log:
        for _ in range(8):
            loss = (model(x) - x.to(devices[1]).roll(1, -1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert_guarded(log, devices)
    for layer in quantized_modules(model).values():
        state = layer.recipe_states["forward"]
        assert isinstance(state.recipe, DelayedScaling)
        assert state.recipe.amax_history_len == options.get("amax_history_len", 1024)
        assert isinstance(state, DelayedScalingState)
        assert state.updates == 8
        assert state.scale[0] != 1
        assert state.device == layer.weight.device
    model.eval()
    before = copy.deepcopy(model.up.recipe_states["forward"].scale)
    model(x)
    assert torch.equal(model.up.recipe_states["forward"].scale, before)


def test_accelerates_mxfp8(te: ModuleType, fresh_accelerate) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs
    from accelerate.utils.imports import is_transformer_engine_mxfp8_available
    from transformer_engine.common.recipe import MXFP8BlockScaling

    assert is_transformer_engine_mxfp8_available()
    handler = TERecipeKwargs(use_mxfp8_block_scaling=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(4, 16)).sum())
    assert isinstance(model.up.recipe_states["forward"].recipe, MXFP8BlockScaling)


# ---- Lightning


def test_lightning_trains(te: ModuleType) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import TransformerEnginePrecision

    precision = TransformerEnginePrecision(
        weights_dtype=torch.float32,
        recipe={"fp8_format": "HYBRID", "amax_history_len": 4},
        fallback_compute_dtype=torch.bfloat16,
    )
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    inner = model.module
    assert type(inner.up) is te.Linear
    assert type(inner.norm) is te.LayerNorm
    with warnings.catch_warnings():  # Lightning enters torch.autocast for GPUs, also without one
        warnings.simplefilter("ignore")
        for _ in range(2):
            fabric.backward(model(torch.randn(8, 16)).square().sum())
            optimizer.step()
    state = inner.up.recipe_states["forward"]
    assert state.recipe.amax_history_len == 4
    assert state.updates == 2


def test_lightning_replaces_classes_while_a_model_is_made(te: ModuleType) -> None:
    from lightning.fabric.plugins.precision import TransformerEnginePrecision

    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True)
    with precision.module_init_context():
        model = nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    assert isinstance(model[0], te.Linear)
    assert isinstance(model[1], te.LayerNorm)
    assert model[0].weight.dtype == torch.bfloat16
    converted = precision.convert_module(model)
    assert converted[0] is model[0]


# ---- subclasses of te.Linear, and fixups for several devices, as vortex has them


def make_projection(te: ModuleType) -> type[nn.Module]:
    from transformer_engine.common.recipe import DelayedScaling, Format

    class Projection(te.Linear):
        def __init__(self, size: int, width: int, init_method, bias: bool, skip_bias_add: bool):
            self.returns = skip_bias_add and bias  # before super(), as they do
            self.fp8_recipe = DelayedScaling(
                fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
            )
            super().__init__(
                in_features=size,
                out_features=width,
                sequence_parallel=False,
                fuse_wgrad_accumulation=False,
                tp_group=None,
                tp_size=1,
                init_method=init_method,
                params_dtype=torch.bfloat16,
                parallel_mode=None,
                bias=bias,
                return_bias=self.returns,
            )

        def forward(self, x: torch.Tensor):
            with te.fp8_autocast(enabled=True, fp8_recipe=self.fp8_recipe):
                out = super().forward(x)
            return out if self.returns else (out, None)

    return Projection


def fix_extra_states(module: nn.Module) -> None:
    """What they do to take FP8 state to the device of the weights."""
    for child in module.children():
        fix_extra_states(child)
    if hasattr(module, "fp8_meta"):
        module.fp8_meta_tensors_initialized = False
        device = next(module.parameters()).device
        with torch.get_device_module(device.type).device(device):
            module.set_extra_state(module.get_extra_state())
        for key in ("scaling_fwd", "scaling_bwd"):
            for name in ("amax_history", "scale"):
                assert getattr(module.fp8_meta[key], name).device == device


def fix_workspaces(devices: Devices) -> None:
    """What they do to have a workspace for each device."""
    from transformer_engine.pytorch.module import base, linear

    backend = torch.get_device_module(devices[0].type)

    @lru_cache
    def by_device(index: int) -> torch.Tensor:
        with backend.device(index):
            base._cublas_workspace = None
            return base.get_workspace()

    linear.get_workspace = lambda: by_device(backend.current_device())
    for device in devices:
        with backend.device(device):
            assert linear.get_workspace().device == device


def test_a_subclass_over_two_devices_with_fixups_computes_what_it_does_on_one(
    te: ModuleType, devices: Devices
) -> None:
    projection = make_projection(te)
    torch.manual_seed(0)
    layers = nn.ModuleList(
        projection(16, 16, nn.init.xavier_normal_, bias, True) for bias in (True, False, True)
    ).to(devices[0])

    def run(model: nn.ModuleList, steps: int = 2) -> dict[str, torch.Tensor]:
        for step in range(steps):
            torch.manual_seed(step)
            model.zero_grad()
            x = torch.randn(4, 16, dtype=torch.bfloat16)
            for layer in model:
                x, bias = layer(x.to(layer.weight.device))
                x = x if bias is None else x + bias
            x.float().square().sum().backward()
        return {"y": x.detach(), **gradients(model)}

    run(layers)
    split = copy.deepcopy(layers)
    split[1].to(devices[1])
    fix_workspaces(devices)
    for model in (layers, split):
        fix_extra_states(model)
    with launches() as log:
        assert_same(run(split), run(layers))
    assert_guarded(log, devices)
    assert split[1].fp8_meta["scaling_fwd"].scale.device == devices[1]
    assert layers[0].recipe_states["forward"].updates > 0


def test_fixups_before_the_first_forward_do_no_harm(te: ModuleType, devices: Devices) -> None:
    layer = make_projection(te)(16, 16, nn.init.xavier_normal_, True, False).to(devices[1])
    twin = copy.deepcopy(layer)
    fix_extra_states(layer)
    x = torch.randn(4, 16, dtype=torch.bfloat16, device=devices[1])
    for _ in range(2):
        assert torch.equal(layer(x)[0], twin(x)[0])


# ---- te.ops, and a model that others train


def test_fusible_operations(te: ModuleType, devices: Devices) -> None:
    model = te.ops.Sequential(
        te.ops.Linear(16, 32, bias=True, device=devices[1]),
        te.ops.BasicLinear(32, 16, device=devices[1]),
        te.ops.Bias(16, device=devices[1]),
    )
    plain = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).to(devices[1])
    with torch.no_grad():
        plain[0].load_state_dict(model[0].state_dict(), strict=False)
        plain[1].weight.copy_(model[1].weight)
        plain[1].bias.copy_(model[2].bias)
    x = torch.randn(4, 16, device=devices[1])
    torch.testing.assert_close(model(x), plain(x))
    with te.autocast(), launches() as log:
        y = model(x)
    y.sum().backward()
    assert_guarded(log, devices[1:])
    assert (y - plain(x)).norm() < 0.1 * plain(x).norm()
    assert te.ops.Linear(4, 4).weight.device == devices[0]
    with pytest.raises(qv.QuaverError, match="accumulate_into_main_grad"):
        te.ops.Linear(4, 4, accumulate_into_main_grad=True)


def test_operations_with_options_that_scripts_pass(te: ModuleType, devices: Devices) -> None:
    norm = te.ops.RMSNorm(16, sm_margin=0)
    assert norm.eps == 1e-5
    assert norm.weight.device == te.ops.LayerNorm(16).weight.device == devices[0]
    model = te.ops.Sequential(
        te.ops.MakeExtraOutput(in_place=True), norm, te.ops.AddExtraInput(in_place=True)
    )
    x = torch.randn(4, 16, device=devices[0])
    y, again = model(x, torch.ones(4, 16, device=devices[0]))
    torch.testing.assert_close(y, 1 + nn.functional.rms_norm(x, (16,), eps=1e-5))
    assert torch.equal(again, x)
