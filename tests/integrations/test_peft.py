"""LoRA on Quaver's layers: trained, merged, unmerged, saved, loaded.

Training over two devices is tested in tests/integration/test_frameworks.py, and before and after
`convert` in tests/conversion/test_transformers.py.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import LlamaForCausalLM

import quaver as qv
from quaver.recipe import named_recipe
from quaver.tensors import QuantizedTensor
from quaver.testing import launches
from tests.conversion.models import calibrate, tiny_llama, tokens
from tests.integration.helpers import equal, quantized_modules
from tests.integrations.transformers.folders import LAYERS, NAMES, load, saved

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
CONFIG = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
ADAPTED = 4
STEP = {"nvfp4": 0.25, "block": 2**-4, "mxfp8": 2**-4}
"""The most that rounding a weight moves it, relative to the largest of its block."""


def adapted(recipe: str, weights: str, ids: torch.Tensor) -> tuple[LlamaForCausalLM, PeftModel]:
    """A converted model with adapters that three steps have trained."""
    model = tiny_llama()
    qv.convert(model, named_recipe(recipe), weights=weights)
    calibrate(model, ids)
    lora = get_peft_model(model, CONFIG)
    trainable = [each for each in lora.parameters() if each.requires_grad]
    assert len(trainable) == 2 * ADAPTED
    optimizer = torch.optim.AdamW(trainable, lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = lora(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model, lora.eval()


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("weights", ["keep", "quantize"])
@pytest.mark.parametrize("recipe", NAMES)
def test_train_merge_and_unmerge(recipe: str, weights: str) -> None:
    ids = tokens(4)
    model, lora = adapted(recipe, weights, ids)
    layer = model.model.layers[0].self_attn.q_proj
    base, frozen = layer.base_layer, layer.base_layer.weight.detach().clone()
    kind = type(base.weight)
    assert issubclass(kind, QuantizedTensor) == (weights == "quantize")
    apart = logits(lora, ids)
    exact = frozen.float() + layer.get_delta_weight("default")
    lora.merge_adapter()
    assert type(base.weight) is kind
    assert isinstance(base.weight, nn.Parameter)
    off = (base.weight.detach().float() - exact).abs().max() / exact.abs().max()
    assert off <= (0 if weights == "keep" else STEP.get(recipe, 2**-4)) + 1e-6
    with launches() as log:
        together = logits(lora, ids)
    assert [launch.kernel for launch in log].count("scaled_mm") == LAYERS
    assert (together - apart).abs().max() < 0.5 * apart.abs().max()
    lora.unmerge_adapter()
    off = (base.weight.detach().float() - frozen.float()).abs().max() / exact.abs().max()
    assert off <= (0 if weights == "keep" else 2 * STEP.get(recipe, 2**-4)) + 1e-6


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_merge_and_unload_leaves_quavers_layers(weights: str) -> None:
    ids = tokens(4)
    _, lora = adapted("current", weights, ids)
    plain = lora.merge_and_unload()
    layers = quantized_modules(plain)
    assert len(layers) == LAYERS
    assert not any("lora" in name for name, _ in plain.named_parameters())
    with launches() as log:
        assert logits(plain, ids).isfinite().all()
    assert [launch.kernel for launch in log].count("scaled_mm") == LAYERS


def test_adapters_of_a_model_that_was_loaded_quantized(devices, tmp_path: Path) -> None:
    """As QLoRA does it: frozen FP8 weights, adapters in high precision, saved by themselves."""
    saved(tmp_path / "plain")
    place = {"": devices[1]}
    base = load(tmp_path / "plain", "mxfp8", "quantize", device_map=place)
    lora = get_peft_model(base, CONFIG)
    ids = tokens(4).to(devices[1])
    trainable = [each for each in lora.parameters() if each.requires_grad]
    assert {each.dtype for each in trainable} == {torch.float32}
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    lora(input_ids=ids, labels=ids).loss.backward()
    assert all(each.grad is not None for each in trainable)
    optimizer.step()
    lora.eval().save_pretrained(tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * ADAPTED
    assert all("lora_" in name for name in names)
    fresh = load(tmp_path / "plain", "mxfp8", "quantize", device_map=place)
    again = PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert equal(logits(again, ids), logits(lora, ids))
