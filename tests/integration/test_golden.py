"""Against what TransformerEngine computed; tests/data/README.md says what it is."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import quaver as qv
from quaver.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from quaver.scaling import DelayedScalingState
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, equal

DATA = Path(__file__).parents[1] / "data" / "linear.npz"
RECIPES: dict[str, Recipe] = {
    "max4": DelayedScaling(amax_history_len=4, first_scale="one"),
    "recent3_margin1": DelayedScaling(
        amax_history_len=3, amax_compute_algo="most_recent", margin=1, first_scale="one"
    ),
    "max1_e4m3": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3, first_scale="one"),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
RESULTS = ("y", "dx", "grad_weight")


@pytest.fixture(scope="module")
def golden() -> Mapping[str, np.ndarray]:
    with np.load(DATA) as file:
        return dict(file)


class Sequence:
    """The recorded sequence of one tag, and a layer that goes through it."""

    def __init__(self, golden: Mapping[str, np.ndarray], tag: str, device: torch.device) -> None:
        self.golden, self.tag, self.device = golden, tag, device

    def read(self, name: str) -> torch.Tensor:
        array = torch.from_numpy(self.golden[f"{self.tag}_{name}"].copy())
        return array.view(torch.bfloat16) if array.dtype == torch.uint16 else array

    def layer(self, dtype: torch.dtype) -> qv.Linear:
        weight, bias = self.read("param_weight"), self.read("param_bias")
        outputs, inputs = weight.shape
        layer = qv.Linear(inputs, outputs, device=self.device, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        return layer

    def steps(self) -> range:
        """The recorded steps: 8 of delayed scaling, 3 of the others."""
        count = sum(f"{self.tag}_s{i}_x" in self.golden for i in range(9))
        assert count >= 3
        return range(count)

    def step(self, layer: qv.Linear, step: int, recipe: Recipe) -> dict[str, torch.Tensor]:
        dtype = layer.weight.dtype
        x = self.read(f"s{step}_x").to(self.device, dtype).requires_grad_()
        layer.zero_grad()
        with qv.autocast(recipe=recipe):
            y = layer(x)
        y.backward(self.read(f"s{step}_g").to(self.device, dtype))
        results = {"y": y, "dx": x.grad, "grad_weight": layer.weight.grad}
        results["grad_bias"] = layer.bias.grad
        return {name: value.detach().cpu() for name, value in results.items()}

    def assert_scaling(self, layer: qv.Linear, step: int) -> None:
        for short, mode in (("fwd", "forward"), ("bwd", "backward")):
            state = layer.recipe_states[mode]
            assert state.device == self.device
            recorded = f"{self.tag}_s{step}_scale_{short}" in self.golden
            assert recorded == isinstance(state, DelayedScalingState)
            if not recorded:
                continue
            assert state.scale.device == self.device
            assert equal(state.scale, self.read(f"s{step}_scale_{short}")), (step, mode)
            assert equal(state.amax_history, self.read(f"s{step}_hist_{short}")), (step, mode)


def relative_error(mine: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return ((mine.float() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", RECIPES)
def test_float32_sequence(
    golden: Mapping[str, np.ndarray], devices: list[torch.device], name: str
) -> None:
    sequence = Sequence(golden, f"linear_{name}_f32", devices[1])
    layer = sequence.layer(torch.float32)
    for step in sequence.steps():
        with launches() as log:
            results = sequence.step(layer, step, RECIPES[name])
        assert_guarded(log, [devices[1]])
        sequence.assert_scaling(layer, step)
        for result in RESULTS:
            expected = sequence.read(f"s{step}_{result}")
            assert relative_error(results[result], expected) < 2e-3, (step, result)
        expected = sequence.read(f"s{step}_grad_bias")
        assert relative_error(results["grad_bias"], expected) < 1e-6, step


@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_sequence(
    golden: Mapping[str, np.ndarray], devices: list[torch.device], name: str
) -> None:
    """The bound of 4e-3 is half a bfloat16 step of the largest entry: it holds before rounding.

    Both sides round once more, to bfloat16. A sum that lies near the middle of two neighbours falls
    to either, by the order of its accumulation: so rounded values may differ by a whole step of
    the entry, and by what a GPU's accumulation of FP8 products may be off (3e-4 of the largest).
    A float32 layer of the same values makes the same payloads and shows ours before the rounding.
    """
    sequence = Sequence(golden, f"linear_{name}_bf16", devices[1])
    layer, unrounded = sequence.layer(torch.bfloat16), sequence.layer(torch.float32)
    for step in sequence.steps():
        results = sequence.step(layer, step, RECIPES[name])
        before = sequence.step(unrounded, step, RECIPES[name])
        sequence.assert_scaling(layer, step)
        sequence.assert_scaling(unrounded, step)
        for result in RESULTS:
            expected = sequence.read(f"s{step}_{result}")
            assert results[result].dtype == expected.dtype == torch.bfloat16
            assert relative_error(before[result], expected) < 4e-3, (step, result)
            theirs, ours = expected.float(), results[result].float()
            one_step = torch.maximum(theirs.abs(), ours.abs()) * 2.0**-7
            bound = one_step + 3e-4 * theirs.abs().max()
            assert ((ours - theirs).abs() <= bound).all(), (step, result)
        assert equal(results["grad_bias"], sequence.read(f"s{step}_grad_bias"))
