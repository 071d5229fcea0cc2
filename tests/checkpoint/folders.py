"""Small checkpoints on disk, written without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LAYERS = ("model.layers.0.up_proj", "model.layers.1.up_proj", "model.layers.1.down_proj")
SHAPES = {LAYERS[0]: (256, 128), LAYERS[1]: (256, 128), LAYERS[2]: (128, 256)}
CONFIG = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 128}


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A model's tensors: three linear layers, and what must stay as it is."""
    made = {f"{layer}.weight": torch.randn(SHAPES[layer]).to(dtype) / 8 for layer in LAYERS}
    made["model.layers.0.up_proj.bias"] = torch.randn(256).to(dtype)
    made["model.embed_tokens.weight"] = torch.randn(16, 128).to(dtype)
    made["lm_head.weight"] = torch.randn(16, 128).to(dtype)
    made["model.norm.weight"] = torch.ones(128, dtype=dtype)
    return made


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A checkpoint in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            mine = {name: tensors[name] for name in names[i::shards]}
            weight_map.update(dict.fromkeys(mine, file))
            save_file(mine, folder / file, metadata={"format": "pt"})
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        files = sorted(set(content["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    found = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118
                found[name] = opened.get_tensor(name)
                assert not index.exists() or content["weight_map"][name] == file
    if index.exists():
        assert set(content["weight_map"]) == set(found)
        total = sum(t.numel() * t.element_size() for t in found.values())
        assert content["metadata"]["total_size"] == total
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and bytes."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        if left.dim()
        else left.dtype == right.dtype and torch.equal(left, right)
    )
