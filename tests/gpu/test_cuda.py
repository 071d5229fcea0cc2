"""One CUDA GPU beside the CPU: the same bytes, states on the tensor's device, a split model."""

import numpy as np
import pytest
import torch
from torch import nn

import quaver as qv
from quaver.quantizers import Quantizer
from quaver.testing import launches

pytestmark = pytest.mark.gpu

FAST_SUMS = 2.0**-11
"""How far, of the largest value, the sums of Hopper's tensor cores may be from float32's.

Products are aligned to the largest and cut to some 14 bits before they are added.
"""

RECIPE = qv.recipe.DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def _only_with_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def _values(dtype: torch.dtype) -> torch.Tensor:
    """Ordinary, tiny, huge and special values: 257 rows of 96."""
    torch.manual_seed(0)
    x = torch.randn(257, 96) * torch.logspace(-9, 6, 257)[:, None]
    x[3] = 0.0
    x[5, 7], x[6, 8], x[7, 9], x[8, 9] = torch.nan, torch.inf, -torch.inf, -torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3.7, 3.1e-5, 448.0 / 3, 2.0e8])
def test_casts_and_dequantized_values_equal_the_cpu_s(cuda, dtype, fp8, scale):
    x = _values(dtype)
    results = []
    for device in (torch.device("cpu"), cuda):
        amax = torch.zeros(1, device=device)
        quantizer = qv.Float8Quantizer(torch.full((1,), scale, device=device), amax, fp8)
        q = quantizer(x.to(device))
        assert q.device == device
        values = q.dequantize().nan_to_num(nan=12345.0)  # a float NaN's bits differ by machine
        parts = (q.rowwise_data, q.columnwise_data, q.rowwise_scale_inv, amax, values)
        results.append([_bits(part) for part in parts])
    names = ("payload", "transposed payload", "scale_inv", "amax", "dequantized")
    for name, ours, theirs in zip(names, *results, strict=True):
        assert np.array_equal(ours, theirs), f"{name}: {(ours != theirs).sum()} bytes differ"


def _bits(tensor: torch.Tensor) -> np.ndarray:
    # reshape: a dimension of one value may have any stride
    return tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy()


def _train(device: torch.device, steps: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    layer = qv.Linear(96, 64).to(device)
    out: dict[str, torch.Tensor] = {}
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(32, 96).to(device).requires_grad_()
        grad = torch.randn(32, 64).to(device)
        with qv.autocast(recipe=RECIPE):
            y = layer(x)
        y.backward(grad)
        out |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
    for mode, state in layer.recipe_states.items():
        assert state.scale.device == device
        out |= {f"scale {mode}": state.scale, f"history {mode}": state.amax_history}
    out["dw"] = layer.weight.grad
    return {name: tensor.cpu() for name, tensor in out.items()}


def test_training_has_the_cpu_s_scales_and_its_outputs_within_float32_rounding(cuda):
    ours, theirs = _train(cuda), _train(torch.device("cpu"))
    for name, value in theirs.items():
        if name.startswith(("scale", "history")):
            assert torch.equal(ours[name], value), name
        elif name.startswith("y"):
            assert (ours[name] - value).abs().max() <= FAST_SUMS * value.abs().max(), name
        else:  # same FP8 operands; sums of 96 or 32 products in another order
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=96 * 2**-24 * 100)


def test_a_model_split_over_cpu_and_gpu_runs_each_layer_where_it_lives(cuda):
    accelerate = pytest.importorskip("accelerate", reason="accelerate splits the model")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    qv.convert(model, RECIPE)
    model = accelerate.dispatch_model(model, {"0": "cpu", "1": 0, "2": 0}, main_device="cpu")
    x = torch.randn(8, 32)
    with launches() as log:
        model(x).square().sum().backward()
    casts = [entry.device.type for entry in log if "cast" in entry.kernel]
    assert casts == ["cpu", "cpu", "cuda", "cuda", "cuda", "cpu"]
    assert all(entry.current == entry.device for entry in log)
    assert model[0].recipe_states["forward"].scale.device.type == "cpu"
    assert model[2].recipe_states["backward"].scale.device == cuda
    assert model[2].weight.grad.device == cuda


def test_the_guard_restores_the_current_device_and_is_null_when_it_is_current(cuda):
    layer = qv.Linear(16, 16, device=cuda)
    with qv.autocast(recipe=RECIPE), pytest.raises(ValueError, match="features"):
        layer(torch.randn(4, 15, device=cuda))
    assert torch.cuda.current_device() == 0


def test_checkpoints_move_between_cpu_and_gpu(cuda, tmp_path):
    source = qv.Linear(16, 16, device=cuda)
    with qv.autocast(recipe=RECIPE):
        source(torch.randn(4, 16, device=cuda))
    torch.save(source.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu")
    target = qv.Linear(16, 16)
    target.load_state_dict(state)
    restored, original = target.recipe_states["forward"], source.recipe_states["forward"]
    assert restored.scale.device.type == "cpu"
    assert torch.equal(restored.scale, original.scale.cpu())
    assert torch.equal(restored.amax_history[-4:], original.amax_history[-4:].cpu())


def test_compiled_equals_eager(cuda):
    torch.manual_seed(3)
    layer = qv.Linear(32, 32, device=cuda)
    x = torch.randn(8, 32, device=cuda)
    with qv.autocast(recipe=RECIPE):
        eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with qv.autocast(recipe=RECIPE):
        assert torch.equal(compiled(x), eager)


def _all_quantizers() -> dict[str, Quantizer]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return {
        "current": qv.Float8CurrentScalingQuantizer(e4m3),
        "current, powers of two": qv.Float8CurrentScalingQuantizer(e5m2, power_2_scale=True),
        "block 1d": qv.Float8BlockQuantizer(e4m3, block_scaling_dim=1),
        "block 2d, float32 scales": qv.Float8BlockQuantizer(e5m2, power_2_scale=False),
        "mx": qv.MXFP8Quantizer(e4m3),
        "nvfp4": qv.NVFP4Quantizer(),
        "nvfp4 2d": qv.NVFP4Quantizer(two_dimensional=True),
        "nvfp4 transformed, stochastic": qv.NVFP4Quantizer(
            hadamard=True, stochastic_rounding=True, seed=7
        ),
    }


@pytest.mark.parametrize("name", list(_all_quantizers()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_has_the_cpu_s_bytes(cuda, dtype, name):
    x = _values(dtype)
    x[5:9] = x[9:13]  # special values among ordinary ones are the next test's
    ours, theirs = (_all_quantizers()[name](x.to(device)) for device in (cuda, "cpu"))
    assert ours.device == cuda
    for part, value in theirs.parts().items():
        assert np.array_equal(_bits(ours.parts()[part]), _bits(value)), part


@pytest.mark.parametrize("name", list(_all_quantizers()))
def test_every_format_has_the_cpu_s_bytes_with_nan_and_inf(cuda, name):
    x = _values(torch.float32)
    ours, theirs = (_all_quantizers()[name](x.to(device)) for device in (cuda, "cpu"))
    for part, value in theirs.parts().items():
        assert np.array_equal(_bits(ours.parts()[part]), _bits(value)), part


STATELESS = [
    qv.recipe.Float8CurrentScaling(),
    qv.recipe.Float8BlockScaling(),
    qv.recipe.MXFP8BlockScaling(),
    qv.recipe.NVFP4BlockScaling(),
]


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: type(recipe).__name__)
def test_every_recipe_has_the_cpu_s_outputs_and_gradients(cuda, recipe):
    results = []
    for device in (torch.device("cpu"), cuda):
        torch.manual_seed(4)
        layer, x = qv.Linear(96, 64), torch.randn(40, 96)
        layer, x = layer.to(device), x.to(device).requires_grad_()
        with qv.autocast(recipe=recipe), launches() as log:
            y = layer(x)
        y.square().sum().backward()
        assert all(entry.device == device for entry in log)
        results.append([t.cpu() for t in (y.detach(), x.grad, layer.weight.grad)])
    # y differs by how it is summed; where that moves a gradient across a rounding step of the
    # format, a few elements move by a step.
    for ours, theirs, bound in zip(*results, (FAST_SUMS, 2e-2, 2e-2), strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()
