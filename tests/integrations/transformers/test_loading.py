"""`from_pretrained` with a QuaverConfig: equal to `convert` after loading, in less memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import quaver as qv
from quaver.conversion import ConversionError, convert_back, status
from quaver.integrations.transformers import QuaverHfQuantizer
from quaver.integrations.transformers.operations import QuantizeWeight
from quaver.tensors import QuantizedTensor
from quaver.testing import launches
from tests.conversion.models import tiny_gpt2, tokens
from tests.integration.helpers import assert_same, equal, quantized_modules, scaling
from tests.integrations.transformers.folders import (
    LAYERS,
    built,
    load,
    logits,
    rewrite,
    saved,
    split,
)

Devices = list[torch.device]


def high_precision_bytes() -> int:
    """Of all float32 tensors that live somewhere but on meta, shared memory counted once."""
    alive = [
        each
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter)
        and each.dtype == torch.float32
        and each.device.type != "meta"
        and each.dim() == 2
    ]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return sum(memory.values())


def test_never_more_than_one_weight_is_held_in_high_precision(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, layers=4)
    gc.collect()
    before, calls, seen = high_precision_bytes(), [], []
    convert = QuantizeWeight.convert

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) % LAYERS == 0:  # what was left alive by then adds up; a look is slow
            seen.append(high_precision_bytes() - before)
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(QuantizeWeight, "convert", watched)
    model = load(tmp_path, "current", "quantize", device_map={"": devices[1]})
    assert (len(calls), len(seen)) == (2 * LAYERS, 2)
    ends = model.model.embed_tokens.weight, model.lm_head.weight
    kept = sum(each.untyped_storage().nbytes() for each in ends)
    largest = 64 * 32 * 4  # bytes of an MLP's weight
    assert max(seen) <= kept + largest
    assert high_precision_bytes() - before <= kept + largest
    quantized = sum(layer.weight.numel() * 4 for layer in quantized_modules(model).values())
    assert quantized > 4 * (kept + largest)  # else the bound would say nothing


def test_the_report_says_what_was_done_and_weights_are_frozen(tmp_path: Path) -> None:
    model = load(saved(tmp_path), "mxfp8", "quantize")
    report = model.hf_quantizer.report
    assert [layer.weights for layer in report.converted] == ["quantized"] * LAYERS
    assert {str(layer.device) for layer in report.converted} == {"cpu"}
    assert [layer.name for layer in report.skipped] == ["lm_head"]
    assert report.unmatched_rules == ()
    assert not any(layer.weight.requires_grad for layer in quantized_modules(model).values())
    assert model.lm_head.weight.requires_grad
    assert "MXFP8BlockScaling" in str(status(model))
    kept = load(tmp_path, "mxfp8", "keep")
    assert all(parameter.requires_grad for parameter in kept.parameters())
    assert {layer.weights for layer in kept.hf_quantizer.report.converted} == {"kept"}


def test_patterns_choose_what_stays(tmp_path: Path) -> None:
    config = qv.QuaverConfig(keep_in_high_precision=["*.mlp.*", "nowhere"])
    model = load(saved(tmp_path), quantization_config=config)
    names = {name.rpartition(".")[2] for name in quantized_modules(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert [rule.match for rule in model.hf_quantizer.report.unmatched_rules] == ["'nowhere'"]
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_tied_head_stays_tied_and_in_high_precision(devices: Devices, tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    config = qv.QuaverConfig("current", keep_in_high_precision=())
    model = load(tmp_path, quantization_config=config, device_map={"": devices[1]})
    assert len(quantized_modules(model)) == LAYERS + 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head.weight) is nn.Parameter
    twin = load(tmp_path).to(devices[1])
    report = qv.convert(twin, config.make_recipe(), weights="quantize", exclude=())
    assert [e.weights for e in report.converted if e.name == "lm_head"] == ["kept"]
    ids = tokens()
    assert equal(logits(model, ids), logits(twin, ids))


def test_gpt2_with_its_transposed_weights(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    ids = tokens()
    for weights in ("keep", "quantize"):
        model = load(tmp_path, "block", weights)
        assert len(quantized_modules(model)) == 8
        twin = load(tmp_path)
        qv.convert(twin, qv.recipe.Float8BlockScaling(), weights=weights)
        with torch.no_grad():
            assert equal(model(ids).logits, twin(ids).logits)


def test_a_bfloat16_model_is_quantized_from_bfloat16(tmp_path: Path) -> None:
    model = load(saved(tmp_path), "current", "quantize", dtype=torch.bfloat16)
    twin = load(tmp_path, dtype=torch.bfloat16)
    qv.convert(twin, qv.recipe.Float8CurrentScaling(), weights="quantize")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    ids = tokens()
    assert equal(logits(model, ids), logits(twin, ids))


def test_a_layer_that_the_checkpoint_lacks_is_initialized_and_then_quantized(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    lost = "model.layers.1.mlp.up_proj"
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{lost}.weight"))
    model = load(tmp_path, "current", "quantize")
    weight = model.get_submodule(lost).weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.dequantize().std().item() == pytest.approx(
        model.config.initializer_range, rel=0.2
    )


def test_a_weight_of_another_shape_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 32)}))
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path, "current", "quantize")


def test_quantized_weights_on_disk_are_refused_and_kept_ones_work(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    load(tmp_path / "model", "delayed", "quantize").save_pretrained(tmp_path / "written")
    places = split(["cpu", "disk"])
    for folder, config in (("model", ("delayed", "quantize")), ("written", ())):
        with pytest.raises(ConversionError, match="disk; give the device map 'cpu' instead"):
            load(tmp_path / folder, *config, device_map=places)
    ids = tokens()
    model = load(tmp_path / "model", "delayed", "keep", device_map=places)
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    twin = built(tmp_path / "model", "delayed", "keep", torch.device("cpu"))
    expected = logits(twin, ids, calibrated=False)
    assert equal(logits(model, ids, calibrated=False), expected)


def test_dequantize_gives_plain_layers_back(tmp_path: Path) -> None:
    model = load(saved(tmp_path), "current", "quantize")
    ids = tokens()
    weight = model.model.layers[0].mlp.up_proj.weight.dequantize()
    plain = model.dequantize()
    assert type(plain.model.layers[0].mlp.up_proj) is nn.Linear
    assert equal(plain.model.layers[0].mlp.up_proj.weight, weight)
    assert not plain.is_quantized
    with torch.no_grad(), launches() as log:
        assert plain(ids).logits.isfinite().all()
    assert log == []
    other = load(tmp_path, "current", "quantize")
    convert_back(other)
    assert equal(other.model.layers[0].mlp.up_proj.weight, weight)


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_an_inferred_device_map_counts_bytes_as_they_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    sizes: dict[str, float] = {}
    measure = QuaverHfQuantizer.param_element_size

    def watched(self: Any, model: Any, name: str, param: torch.Tensor) -> float:
        sizes[name] = measure(self, model, name, param)
        return sizes[name]

    monkeypatch.setattr(QuaverHfQuantizer, "param_element_size", watched)
    model = load(saved(tmp_path), "nvfp4", weights, device_map="auto", max_memory={"cpu": "1GB"})
    assert sizes["model.embed_tokens.weight"] == 4
    assert sizes["model.layers.0.mlp.up_proj.weight"] == (4 if weights == "keep" else 9 / 16)
    assert len(quantized_modules(model)) == LAYERS
    assert logits(model, tokens()).isfinite().all()


class OwnLlama(LlamaForCausalLM):
    """A model whose author has put Quaver's layers into it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        qv.convert(self, qv.recipe.DelayedScaling())


def test_a_plain_checkpoint_into_a_model_that_is_built_of_quavers_layers(
    devices: Devices, tmp_path: Path
) -> None:
    """The loader fills what the checkpoint lacks, `_extra_state` too, with memory as it is."""
    model = OwnLlama.from_pretrained(saved(tmp_path), device_map={"": devices[1]})
    twin = built(tmp_path, "delayed", "keep", devices[1])
    assert "_extra_state" not in vars(model.model.layers[0].mlp.up_proj)
    ids = tokens()
    assert equal(logits(model, ids, calibrated=False), logits(twin, ids, calibrated=False))
    model.save_pretrained(tmp_path / "saved")
    again = OwnLlama.from_pretrained(tmp_path / "saved", device_map={"": devices[0]})
    assert_same(scaling(again), scaling(model))
