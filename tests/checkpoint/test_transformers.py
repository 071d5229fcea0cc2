"""transformers loads what we write, and we load what it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations import fbgemm_fp8
from transformers.quantizers.quantizer_fbgemm_fp8 import FbgemmFp8HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import quaver as qv
from quaver.checkpoint import convert_checkpoint, flatten_state, load_quantized
from quaver.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from quaver.tensors import Float8BlockwiseTensor, Float8Tensor, MXFP8Tensor
from tests.checkpoint.folders import read, same

LINEARS = 7  # of the one block
CHOICES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "e8m0": {"scale_format": "e8m0"},
    "mx": {"recipe": MXFP8BlockScaling()},
    "tensor": {"recipe": Float8CurrentScaling()},
    "rows of blocks": {"recipe": Float8BlockScaling(w_block_scaling_dim=1)},
}
CLASSES = {"mx": MXFP8Tensor, "tensor": Float8Tensor}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sides are multiples of 128, but for 64 rows in k_proj and v_proj."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(params=[False, True], ids=["dequantized", "as FP8"])
def kept_as_fp8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Without a GPU transformers dequantizes on loading; with one it keeps FP8.

    The check is all that hinders it on the CPU: the weights can be looked at, though not used.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if request.param:
        monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
    return request.param


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith("_proj.weight")}


@pytest.mark.parametrize("choice", CHOICES)
def test_transformers_loads_what_we_write(
    choice: str, llama: Path, tmp_path: Path, kept_as_fp8: bool
) -> None:
    convert_checkpoint(llama, tmp_path, format="finegrained-fp8", force=True, **CHOICES[choice])
    ours = qv_model(llama)
    report = load_quantized(ours, tmp_path)
    assert len(report.quantized) == LINEARS
    assert {kind for _, kind in report.quantized} == {
        CLASSES.get(choice, Float8BlockwiseTensor).__name__
    }
    theirs, files = load(tmp_path), read(tmp_path)
    for name, weight in weights_of(theirs).items():
        mine = ours.get_parameter(name)
        if kept_as_fp8:
            assert same(weight, files[name])
            assert same(theirs.state_dict()[f"{name}_scale_inv"], files[f"{name}_scale_inv"])
            assert same(weight, mine.rowwise_data)
        else:
            assert weight.dtype == torch.bfloat16
            assert same(weight, mine.dequantize())
    assert same(theirs.lm_head.weight, ours.lm_head.weight)


def plain_model(folder: Path) -> Any:
    """The model of `folder` with other weights."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def qv_model(folder: Path) -> Any:
    """The model of `folder` with other weights, its linear layers ours."""
    model = plain_model(folder)
    qv.convert(model, Float8BlockScaling())
    return model


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_we_load_what_transformers_writes(
    scale_fmt: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
    config = FineGrainedFP8Config(
        # It does not quantize weights that 128 does not divide, but expects scales for them.
        modules_to_not_convert=["lm_head", "k_proj", "v_proj"],
        scale_fmt=scale_fmt,
    )
    theirs = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    theirs.save_pretrained(tmp_path)
    files = read(tmp_path)
    ours = qv_model(llama)
    report = load_quantized(ours, tmp_path)
    assert len(report.quantized) == LINEARS - 2
    assert not report.dequantized
    for name, _ in report.quantized:
        weight = ours.get_parameter(name)
        assert same(weight.rowwise_data, files[name])
        assert torch.equal(weight.rowwise_scale_inv, files[f"{name}_scale_inv"].float())
    name = "model.layers.0.self_attn.k_proj.weight"
    assert same(ours.get_parameter(name), files[name])
    tokens = torch.arange(8)[None]
    dequantized = plain_model(llama)
    load_quantized(dequantized, tmp_path)  # layers that are not ours
    with torch.no_grad(), qv.autocast(enabled=False):
        assert torch.equal(ours(tokens).logits, dequantized(tokens).logits)
    with torch.no_grad():
        quantized = ours(tokens).logits
    assert not torch.equal(quantized, dequantized(tokens).logits)
    assert torch.allclose(quantized, dequantized(tokens).logits, atol=0.1)


def test_save_pretrained_writes_what_was_flattened(llama: Path, tmp_path: Path) -> None:
    source = LlamaForCausalLM.from_pretrained(llama)
    qv.convert(source, Float8BlockScaling(), weights="quantize")
    flat, _ = flatten_state(source.state_dict())
    source.save_pretrained(tmp_path, state_dict=flat, max_shard_size="50KB")
    ours = qv_model(llama)
    assert len(load_quantized(ours, tmp_path).quantized) == LINEARS
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, source(tokens).logits)


def test_static_scales_reach_transformers_layers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
    layers = [name.removesuffix(".weight") for name in weights_of(load(llama))]
    scales = {layer: 2.0**-i for i, layer in enumerate(layers)}
    convert_checkpoint(llama, tmp_path, format="finegrained-fp8", static_scales=scales, force=True)
    theirs = load(tmp_path)
    for layer, scale in scales.items():
        assert theirs.get_submodule(layer).activation_scale.item() == scale


def test_transformers_loads_what_we_write_as_fbgemm_and_we_what_it_writes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a GPU and the package of its kernels, of which loading uses nothing."""
    monkeypatch.setattr(FbgemmFp8HfQuantizer, "validate_environment", lambda *a, **k: None)
    monkeypatch.setattr(fbgemm_fp8, "get_quantize_fp8_per_row", lambda: None)
    convert_checkpoint(llama, tmp_path / "ours", format="fbgemm-fp8")
    theirs, files = load(tmp_path / "ours"), read(tmp_path / "ours")
    weights = weights_of(theirs)
    assert len(weights) == LINEARS
    for name, weight in weights.items():
        layer = theirs.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, fbgemm_fp8.FbgemmFp8Linear)
        assert same(weight, files[name])
        assert same(layer.weight_scale.detach(), files[f"{name}_scale"])
    theirs.save_pretrained(tmp_path / "theirs")
    again = qv_model(llama)
    assert len(load_quantized(again, tmp_path / "theirs").quantized) == LINEARS
    for name in weights:
        value = files[name].float() * files[f"{name}_scale"]
        assert same(again.get_parameter(name).dequantize(torch.float32), value)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8BlockScaling()])
def test_we_load_what_compressed_tensors_writes(recipe: Any, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    convert_checkpoint(llama, tmp_path / "ours", format="compressed-tensors", recipe=recipe)
    theirs = load(tmp_path / "ours")  # stays FP8; its scales become bfloat16
    theirs.save_pretrained(tmp_path / "theirs")
    before, files = read(tmp_path / "ours"), read(tmp_path / "theirs")
    ours = qv_model(llama)
    report = load_quantized(ours, tmp_path / "theirs")
    assert len(report.quantized) == LINEARS
    for name, _ in report.quantized:
        weight = ours.get_parameter(name)
        assert same(weight.rowwise_data, before[name])
        scale = files[f"{name}_scale"].float()
        if isinstance(recipe, Float8BlockScaling):
            rows, columns = weight.shape
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        value = before[name].float() * scale  # a scale a row, or one
        assert same(weight.dequantize(torch.float32), value)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("is_static", [False, True])
def test_compressed_tensors_loads_what_we_write(
    recipe: Any, is_static: bool, llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    layers = [name.removesuffix(".weight") for name in weights_of(load(llama))]
    static = dict.fromkeys(layers, 0.25) if is_static else None
    convert_checkpoint(
        llama,
        tmp_path,
        format="compressed-tensors",
        recipe=recipe,
        static_scales=static,
        force=True,
    )
    ours = qv_model(llama)
    load_quantized(ours, tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    for name, weight in weights_of(theirs).items():
        assert same(weight, ours.get_parameter(name).dequantize(torch.bfloat16))
