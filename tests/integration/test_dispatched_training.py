"""The script that multi-device bugs are reported with: a Llama that accelerate splits, trained.

Nothing sets the current device: it is the first throughout. GPUs that can have peer access on, with
which a kernel on the wrong one may well succeed. On two GPUs this takes 100 iterations.
"""

import copy

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import LlamaForCausalLM

import quaver as qv
from quaver.devices import current_device
from quaver.recipe import DelayedScaling, Format
from quaver.testing import launches
from tests.conversion.models import tiny_llama, tokens
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    gradients,
    quantized_modules,
    scaling,
)
from tests.integration.triton_hook import assert_hooked, enable_peer_access, triton_launches

RECIPE = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
ITERATIONS = {"sim": 4, "cuda": 100}
LAYERS = 4

Devices = list[torch.device]


def device_map(devices: Devices) -> dict[str, torch.device]:
    """Half of the blocks on each device, the head and the embedding on the first."""
    where = {f"model.layers.{i}": devices[2 * i // LAYERS] for i in range(LAYERS)}
    ends = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 0}
    return where | {name: devices[index] for name, index in ends.items()}


def llama() -> LlamaForCausalLM:
    """Attention by plain products, since the fused kernels' gradients differ from run to run."""
    model = tiny_llama(LAYERS).train()
    model.set_attn_implementation("eager")
    assert len(qv.convert(model, RECIPE).converted) == 7 * LAYERS
    return model


def step(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A forward and a backward pass: outputs, scales and histories, gradients."""
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    assert out.logits.isfinite().all()
    results = {"logits": out.logits.detach().cpu(), "loss": out.loss.detach().cpu()}
    return results | scaling(model) | gradients(model)


@pytest.mark.timeout(300)
def test_a_dispatched_llama_trains_as_on_one_device(devices: Devices) -> None:
    enable_peer_access(devices)
    split = llama()
    whole = copy.deepcopy(split).to(devices[0])
    dispatch_model(split, device_map(devices))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (split, whole)]
    seen = set()
    for _ in range(ITERATIONS[devices[0].type]):
        ids = tokens(rows=4).to(devices[0])
        with launches() as log, triton_launches(log) as hooked:
            results = step(split, ids)
        assert_guarded(log, devices, least=7 * LAYERS * 6)
        if devices[0].type == "cuda":  # elsewhere Triton launches nothing
            assert_hooked(hooked, devices, least=3 * 7 * LAYERS)
        assert current_device(devices[0].type) == devices[0]
        assert_same(results, step(whole, ids))
        for optimizer in optimizers:
            optimizer.step()
        history = results["model.layers.3.mlp.down_proj.forward.amax_history"]
        seen.add(history[-1, 0].item())
    assert len(seen) == ITERATIONS[devices[0].type]  # each iteration is another one
    for name, layer in quantized_modules(split).items():
        block = int(name.split(".")[2])
        assert_state_devices(layer, devices[2 * block // LAYERS])
    assert equal(split.lm_head.weight, whole.lm_head.weight)
