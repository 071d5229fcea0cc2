"""Checkpoints onto one CUDA GPU: the same payloads and scales, outputs within a bound."""

from pathlib import Path

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.checkpoint import load_model, load_quantized, save_model
from quaver.testing import simulated_devices
from tests.checkpoint.folders import SHAPES, same, weights, write

RECIPES = {
    "delayed": qv.recipe.DelayedScaling(amax_history_len=4),
    "block": qv.recipe.Float8BlockScaling(),
    "mx": qv.recipe.MXFP8BlockScaling(),
    "nvfp4": qv.recipe.NVFP4BlockScaling(),
}


IN, BETWEEN = 32, 64


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A simulated device stands for the GPU where there is none; there nothing differs."""
    if request.param == "sim":
        return simulated_devices(1)[0]
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


def model(recipe: qv.recipe.Recipe, device: torch.device | str) -> nn.Sequential:
    with qv.quantized_model_init(recipe=recipe):
        return nn.Sequential(
            qv.Linear(IN, BETWEEN, device=device, recipe=recipe),
            qv.Linear(BETWEEN, IN, device=device, recipe=recipe),
        )


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far a layer's output of operands that are the same bit for bit may be from another's.

    The tensor cores add 32 products to a sum at a time, align these 33 terms to the largest and cut
    each off after 13 fraction bits: |error| <= 33 2^-13 |a| |b| a step, of K / 32 steps, for a term
    or a sum is at most |a| |b|, the norms of the rows. Another 2 K 2^-24 are for the other's own
    sum, scales and the bias. A quantized row's norm is at most 1.5 times that of the row, which
    holds for FP4, the coarsest.
    """
    terms = x.shape[1]
    norms = x.norm(dim=1).outer(weight.norm(dim=1))
    return norms * 1.5**2 * (33 * -(-terms // 32) * 2.0**-13 + 2 * terms * 2.0**-24)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_trained_model_is_the_same_there_and_back(
    kind: str, tmp_path: Path, device: torch.device
) -> None:
    recipe = RECIPES[kind]
    source = model(recipe, "cpu")
    for _ in range(2):
        with qv.autocast(recipe=recipe):
            source(torch.randn(16, IN)).sum().backward()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.sub_(0.01 * parameter.grad)
        source.zero_grad()
    save_model(source, tmp_path / "cpu")
    there = model(recipe, device)
    load_model(there, tmp_path / "cpu")
    save_model(there, tmp_path / "cuda")
    back = model(recipe, "cpu")
    load_model(back, tmp_path / "cuda")
    for layer, mine, theirs in zip(source, there, back, strict=True):
        assert mine.weight.device == device
        for name, part in layer.weight.parts().items():
            assert same(mine.weight.parts()[name].cpu(), part)
            assert same(theirs.weight.parts()[name], part)
        assert same(layer.get_extra_state(), mine.get_extra_state())
    x = torch.randn(4, IN)
    for layer, mine in zip(source, there, strict=True):
        weight = layer.weight.dequantize()
        with torch.no_grad(), qv.autocast(recipe=recipe):
            expected, found = layer(x), mine(x.to(device)).cpu()
        if device.type == "cuda":
            assert ((found - expected).abs() <= bound(x, weight)).all()
        else:
            assert torch.equal(found, expected)
        x = expected


def test_an_fp8_checkpoint_goes_to_the_gpu(tmp_path: Path, device: torch.device) -> None:
    name, shape = next(iter(SHAPES.items()))
    tensors = {"up.weight": weights()[f"{name}.weight"].to(torch.float8_e4m3fn)}
    tensors["up.weight_scale"] = torch.rand(shape[0], 1) + 0.5
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    ours = nn.ModuleDict({"up": qv.Linear(shape[1], shape[0], bias=False, device=device)})
    load_quantized(ours, tmp_path)
    value = tensors["up.weight"].float() * tensors["up.weight_scale"]
    assert ours["up"].weight.device == device
    assert same(ours["up"].weight.dequantize().cpu(), value)
