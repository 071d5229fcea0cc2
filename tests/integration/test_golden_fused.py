"""LayerNormLinear and LayerNormMLP against what TransformerEngine computed (tests/data/README.md).

Bounds are relative to the largest entry. Those of the gradients are derived here:

- EXACT, for all of them: a GPU sums FP8 products with about 13 bits, so that a sum may be off by
  2**-13 of its largest terms; a few such, as for the outputs.
- A bfloat16 result may fall to either neighbour: one step, 2**-7 of it. The gradients of the input
  went through a second rounding, before the norm's.
- In the MLP, what is quantized after the activation, and after its gradient, is computed by other
  exponential functions here and there, and from sums that are off as above. A value that lies on
  a boundary is then quantized to the neighbour, off by 1/8 of itself at most in E4M3, by 1/4 in
  E5M2. MOVED is what the README says that this does to y, whose entries sum 64 E4M3 values. One
  value among n random ones weighs 1/sqrt(n): so it is twice that for the gradient of fc2's weight,
  which sums 16; twice for dx, which sums 64 or 128 E5M2 values, and the norm's gain, which sums
  them over; four times for fc1's weight, which sums 16 of these. Few values lie on a boundary, so
  the error in the norm is half of what one entry may have. The biases sum before the casts.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import quaver as qv
from quaver.functional import norm_linear
from quaver.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from quaver.scaling import DelayedScalingState
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, equal
from tests.integration.recipes import error as error_in_norm

DATA = Path(__file__).parents[1] / "data" / "fused.npz"
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4, first_scale="one"),
    "current": Float8CurrentScaling(),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ACTIVATIONS = ("gelu", "swiglu", "srelu", "geglu")
EXACT = 3e-4
STEP = {"f32": 0.0, "bf16": 2.0**-7}
MOVED = {"f32": 2e-2, "bf16": 4e-2}
WEIGHS = {"y": 1, "dx": 2, "grad_layer_norm_weight": 2, "grad_fc1_weight": 4, "grad_fc2_weight": 2}
WEIGHS |= {"grad_fc1_bias": 0, "grad_fc2_bias": 0}

recipes = pytest.mark.parametrize("recipe", RECIPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def golden() -> Mapping[str, np.ndarray]:
    with np.load(DATA) as file:
        return dict(file)


class Sequence:
    """The recorded steps of one tag."""

    def __init__(self, golden: Mapping[str, np.ndarray], tag: str, device: torch.device) -> None:
        self.golden, self.tag, self.device = golden, tag, device

    def read(self, name: str) -> torch.Tensor:
        array = torch.from_numpy(self.golden[f"{self.tag}_{name}"].copy())
        return array.view(torch.bfloat16) if array.dtype == torch.uint16 else array

    def filled(self, module: torch.nn.Module) -> torch.nn.Module:
        names = {name for name, _ in module.named_parameters()}
        recorded = {key for key in self.golden if key.startswith(f"{self.tag}_param_")}
        assert {f"{self.tag}_param_{name}" for name in names} == recorded
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.read(f"param_{name}"))
        return module

    def step(self, module: torch.nn.Module, step: int, recipe: Recipe) -> dict[str, torch.Tensor]:
        dtype = next(module.parameters()).dtype
        x = self.read(f"s{step}_x").to(self.device, dtype).requires_grad_()
        module.zero_grad()
        with qv.autocast(recipe=recipe):
            y = module(x)
        y.backward(self.read(f"s{step}_g").to(self.device, dtype))
        grads = {f"grad_{name}": p.grad for name, p in module.named_parameters()}
        return {"y": y.detach().cpu(), "dx": x.grad.cpu()} | {n: g.cpu() for n, g in grads.items()}

    def errors(self, results: dict[str, torch.Tensor], step: int) -> dict[str, float]:
        return {n: relative_error(r, self.read(f"s{step}_{n}")) for n, r in results.items()}

    def assert_scaling(self, module: torch.nn.Module, step: int, bound: float) -> None:
        for short, mode in (("fwd", "forward"), ("bwd", "backward")):
            state = module.recipe_states[mode]
            assert state.device == self.device
            if not isinstance(state, DelayedScalingState):
                assert f"{self.tag}_s{step}_hist_{short}" not in self.golden
                continue
            for name, mine in (("hist", state.amax_history), ("scale", state.scale)):
                theirs = self.read(f"s{step}_{name}_{short}")
                assert mine.shape == theirs.shape
                assert ((mine.cpu() - theirs).abs() <= bound * theirs.abs()).all(), (step, mode)


def relative_error(mine: torch.Tensor, expected: torch.Tensor) -> float:
    assert mine.dtype in {expected.dtype, torch.float32}
    assert mine.shape == expected.shape
    expected = expected.float()
    return ((mine.float() - expected).abs().max() / expected.abs().max()).item()


def rounded_first(x, weight, bias, eps, zero_centered, rms, dtype):
    """The norm as a bfloat16 layer rounds it, for a float32 layer."""
    y, mean, rstd = qv.kernels.norm(x, weight, bias, eps, zero_centered, rms, torch.bfloat16)
    return y.to(dtype), mean, rstd


@recipes
@dtypes
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layernorm_linear(
    golden, devices, monkeypatch, normalization, zero_centered, dtype, recipe
) -> None:
    """As for a linear, the bound of bfloat16 outputs holds before their last rounding.

    A float32 layer of the same values makes the same payloads and shows ours; where the norm's
    output is rounded before it is quantized, it is made to do so, too.
    """
    tag = f"lnlinear_{normalization}_zc{int(zero_centered)}_{recipe}_{dtype}"
    sequence = Sequence(golden, tag, devices[1])

    def make(kind: torch.dtype) -> torch.nn.Module:
        return sequence.filled(
            qv.LayerNormLinear(
                32,
                48,
                normalization=normalization,
                zero_centered_gamma=zero_centered,
                device=devices[1],
                dtype=kind,
            )
        )

    module, unrounded = make(DTYPES[dtype]), make(torch.float32)
    for step in range(3):
        with launches() as log:
            results = sequence.step(module, step, RECIPES[recipe])
        assert_guarded(log, [devices[1]])
        sequence.assert_scaling(module, step, 1e-6)
        errors = sequence.errors(results, step)
        assert errors.pop("dx") <= EXACT + 2 * STEP[dtype]
        y_error = errors.pop("y")
        assert all(error <= EXACT + STEP[dtype] for error in errors.values()), errors
        if dtype == "f32":
            assert y_error <= EXACT
            continue
        with monkeypatch.context() as patch:
            patch.setattr(norm_linear, "norm", rounded_first)
            before = sequence.step(unrounded, step, RECIPES[recipe])["y"]
        assert relative_error(before, sequence.read(f"s{step}_y")) <= 4e-3
        if devices[1].type != "cuda":  # where the two products may be summed in other orders
            assert equal(before.to(torch.bfloat16), results["y"])


@recipes
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp(golden, devices, activation, dtype, recipe) -> None:
    sequence = Sequence(golden, f"lnmlp_{activation}_{recipe}_{dtype}", devices[1])
    module = sequence.filled(
        qv.LayerNormMLP(
            32,
            64,
            normalization="RMSNorm",
            activation=activation,
            device=devices[1],
            dtype=DTYPES[dtype],
        )
    )
    for step in range(3):
        with launches() as log:
            results = sequence.step(module, step, RECIPES[recipe])
        assert_guarded(log, [devices[1]])
        sequence.assert_scaling(module, step, {"f32": 3e-4, "bf16": 1e-6}[dtype])
        for name, error in sequence.errors(results, step).items():
            moved = WEIGHS[name] * MOVED[dtype]
            rounded = 0.0 if name == "y" else EXACT + STEP[dtype]
            assert error <= moved + rounded, (step, name)
            of_all = error_in_norm(results[name], sequence.read(f"s{step}_{name}"))
            assert of_all <= moved / 2 + rounded, (step, name)
