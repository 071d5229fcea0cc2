"""Fused operations on a GPU, against the same operations called in turn."""

import pytest
import torch

from tests.integration.helpers import assert_same
from tests.integration.recipes import RECIPES
from tests.ops.chains import make, step, unfused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

SAME_KERNELS = (
    "linear_add",
    "linear_scale_add",
    "output_linear",
    "output_linear_add",
    "output_rms",
)
"""Chains whose fusion launches the same kernels on the same values."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SAME_KERNELS)
def test_the_same_kernels_give_the_same_bits(name: str, recipe: str, dtype: torch.dtype) -> None:
    model = make(name, "cuda:0", dtype)
    twin = unfused(model)
    for i in range(2):
        options = {"device": "cuda:0", "dtype": dtype, "number": i}
        found = step(name, model, RECIPES[recipe], **options)
        assert_same(found, step(name, twin, RECIPES[recipe], **options))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["linear_bias_gelu", "linear_bias_swiglu", "block"])
def test_other_kernels_agree_with_them(name: str, recipe: str) -> None:
    """Sums of another order, and exponentials of another kernel, may move an FP8 value by a step.

    A step of E5M2 is a quarter of a value at most, of FP4 a half; few values move, so that in the
    norm the difference is far below that.
    """
    model = make(name, "cuda:0")
    twin = unfused(model)
    found = step(name, model, RECIPES[recipe], device="cuda:0")
    for key, value in step(name, twin, RECIPES[recipe], device="cuda:0").items():
        assert (found[key] - value).norm() <= 0.05 * value.norm(), key
