"""Under accelerate, transformers and peft, which know nothing of Quaver."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

import quaver as qv
from quaver.devices import current_device
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.conversion.models import calibrate, tiny_llama, tokens
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    assert_state_devices,
    equal,
    quantized_modules,
    scaling,
)

RECIPE = DelayedScaling(amax_history_len=4)
LAYERS = 14  # linear layers of the two blocks

Devices = list[torch.device]


def device_map(devices: Devices) -> dict[str, torch.device]:
    """The head on the first device, like the embedding; the second block on the second."""
    where = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    where |= {"model.norm": 1, "model.rotary_emb": 0, "lm_head": 0}
    return {name: devices[i] for name, i in where.items()}


def converted_llama() -> LlamaForCausalLM:
    model = tiny_llama()
    assert len(qv.convert(model, RECIPE).converted) == LAYERS
    return model


def assert_split(model: nn.Module, devices: Devices) -> None:
    for name, layer in quantized_modules(model).items():
        place = devices[1] if ".layers.1." in f".{name}" else devices[0]
        assert layer.weight.device == place, name
        assert_state_devices(layer, place)


@pytest.mark.parametrize("order", ["convert first", "dispatch first"])
@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_dispatch_over_two_devices(devices: Devices, weights: str, order: str) -> None:
    model = tiny_llama()
    whole = copy.deepcopy(model)
    if order == "dispatch first":
        dispatch_model(model, device_map(devices))
    for each in (model, whole):
        assert len(qv.convert(each, RECIPE, weights=weights).converted) == LAYERS
    if order == "convert first":
        dispatch_model(model, device_map(devices))
    whole.to(devices[0])
    ids = tokens().to(devices[0])
    for each in (model, whole):
        calibrate(each, ids)
    with launches() as log, torch.no_grad():
        logits = model(ids).logits
    assert_guarded(log, devices, least=3 * LAYERS if weights == "keep" else 2 * LAYERS)
    assert [launch.kernel for launch in log].count("scaled_mm") == LAYERS
    assert_split(model, devices)
    assert logits.device == devices[0]
    with torch.no_grad():
        assert equal(logits, whole(ids).logits)
    assert_same(scaling(model), scaling(whole))
    assert current_device(devices[0].type) == devices[0]


def test_training_a_dispatched_model_equals_the_unsplit_one(devices: Devices) -> None:
    split = converted_llama()
    whole = copy.deepcopy(split).to(devices[0])
    dispatch_model(split, device_map(devices))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (split, whole)]
    for _ in range(3):
        ids = tokens().to(devices[0])
        losses = []
        for model, optimizer in zip((split, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert equal(*losses)
        assert_same(scaling(split), scaling(whole))
    assert_split(split, devices)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.second = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def calibrated_blocks(x: torch.Tensor, weights: str = "keep") -> Blocks:
    model = Blocks()
    qv.convert(model, RECIPE, weights=weights)
    calibrate(model, x)
    return model


@pytest.mark.parametrize("main", [1, "cpu"])
def test_offload_to_cpu_and_disk(devices: Devices, main: int | str, tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    model = calibrated_blocks(x)
    twin = copy.deepcopy(model)
    main_device = torch.device(main) if isinstance(main, str) else devices[main]
    dispatch_model(
        model,
        {"first": "cpu", "second": "disk"},
        main_device=main_device,
        offload_dir=str(tmp_path),
        force_hooks=True,
    )
    assert model.second[0].weight.device.type == "meta"
    twin.to(main_device)
    before = scaling(model)
    with torch.no_grad():
        for _ in range(2):
            with launches() as log:
                y = model(x)
            assert_guarded(log, [main_device], least=4 * 3)
            assert equal(y, twin(x.to(main_device)))
    assert model.second[0].weight.device.type == "meta"
    assert_same(scaling(model), before)
    assert current_device(devices[0].type) == devices[0]


def test_cpu_offload_of_quantized_weights(devices: Devices) -> None:
    x = torch.randn(4, 16)
    model = calibrated_blocks(x, "quantize")
    twin = copy.deepcopy(model).to(devices[1])
    cpu_offload(model, execution_device=devices[1])
    with torch.no_grad(), launches() as log:
        y = model(x)
    assert_guarded(log, [devices[1]], least=4 * 2)
    with torch.no_grad():
        assert equal(y, twin(x.to(devices[1])))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_on_converted_layers_trains(devices: Devices) -> None:
    model = converted_llama()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = set(quantized_modules(model))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    lora = get_peft_model(model, config)
    dispatch_model(model, device_map(devices))
    trainable = [p for p in lora.parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * 2
    optimizer = torch.optim.AdamW(trainable, lr=0.02)
    ids = tokens(4).to(devices[0])
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with launches() as log:
            loss = lora(input_ids=ids, labels=ids).loss
            loss.backward()
        assert_guarded(log, devices, least=3 * LAYERS)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    for name, layer in quantized_modules(model).items():
        assert name.removesuffix(".base_layer") in names
        original = frozen[f"{name.removesuffix('.base_layer')}.weight"]
        assert equal(layer.weight, original)
        assert layer.weight.grad is None
        assert layer.recipe_states["forward"].updates == 8
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainable)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_of_transformers_changes_nothing(devices: Devices) -> None:
    model = converted_llama().train()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        dispatch_model(each, device_map(devices))
    model.gradient_checkpointing_enable()
    ids = tokens().to(devices[0])
    for _ in range(2):
        results = []
        for each in (model, plain):
            each.zero_grad()
            with launches() as log:
                each(ids, labels=ids).loss.backward()
            products = [launch.kernel for launch in log].count("scaled_mm")
            assert products == LAYERS * (4 if each is model else 3)
            results.append({n: p.grad.cpu() for n, p in each.named_parameters()})
        assert_same(*results)
        assert_same(scaling(model), scaling(plain))
