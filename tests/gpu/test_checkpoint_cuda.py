"""Checkpoints onto one CUDA GPU: the same payloads and scales, the same values."""

from pathlib import Path

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.checkpoint import load_model, load_quantized, save_model
from tests.checkpoint.folders import SHAPES, same, weights, write

pytestmark = pytest.mark.gpu

RECIPES = {
    "delayed": qv.recipe.DelayedScaling(amax_history_len=4),
    "block": qv.recipe.Float8BlockScaling(),
    "mx": qv.recipe.MXFP8BlockScaling(),
    "nvfp4": qv.recipe.NVFP4BlockScaling(),
}


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


def model(recipe: qv.recipe.Recipe, device: torch.device | str) -> nn.Sequential:
    with qv.quantized_model_init(recipe=recipe):
        return nn.Sequential(
            qv.Linear(256, 128, device=device, recipe=recipe),
            qv.Linear(128, 256, device=device, recipe=recipe),
        )


@pytest.mark.parametrize("kind", RECIPES)
def test_a_trained_model_is_the_same_there_and_back(
    kind: str, tmp_path: Path, cuda: torch.device
) -> None:
    recipe = RECIPES[kind]
    source = model(recipe, "cpu")
    with qv.autocast(recipe=recipe):
        source(torch.randn(16, 256)).sum().backward()
    save_model(source, tmp_path / "cpu")
    there = model(recipe, cuda)
    load_model(there, tmp_path / "cpu")
    save_model(there, tmp_path / "cuda")
    back = model(recipe, "cpu")
    load_model(back, tmp_path / "cuda")
    for layer, mine, theirs in zip(source, there, back, strict=True):
        assert mine.weight.device == cuda
        for name, part in layer.weight.parts().items():
            assert same(mine.weight.parts()[name].cpu(), part)
            assert same(theirs.weight.parts()[name], part)
        assert same(layer.get_extra_state(), mine.get_extra_state())
    x = torch.randn(4, 256)
    with torch.no_grad(), qv.autocast(recipe=recipe):
        expected, found = source(x), there(x.to(cuda)).cpu()
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()  # order of summation


def test_an_fp8_checkpoint_goes_to_the_gpu(tmp_path: Path, cuda: torch.device) -> None:
    name, shape = next(iter(SHAPES.items()))
    tensors = {"up.weight": weights()[f"{name}.weight"].to(torch.float8_e4m3fn)}
    tensors["up.weight_scale"] = torch.rand(shape[0], 1) + 0.5
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    ours = nn.ModuleDict({"up": qv.Linear(shape[1], shape[0], bias=False, device=cuda)})
    load_quantized(ours, tmp_path)
    value = tensors["up.weight"].float() * tensors["up.weight_scale"]
    assert ours["up"].weight.device == cuda
    assert same(ours["up"].weight.dequantize().cpu(), value)
