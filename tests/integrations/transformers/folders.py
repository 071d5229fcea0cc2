"""Saved models, device maps and logits, for the tests of loading."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import quaver as qv
from quaver.recipe import named_recipe
from tests.conversion.models import calibrate, tiny_llama

LAYERS = 14
"""Linear layers of the tiny Llama but for lm_head."""
NAMES = list(qv.recipe.RECIPE_NAMES)


def saved(folder: Path, **options: Any) -> Path:
    """A folder with a tiny Llama in float32."""
    tiny_llama(**options).save_pretrained(folder)
    return folder


def load(folder: Path, *config: str, **options: Any) -> nn.Module:
    """The folder's model; `config` is the recipe and how its weights are kept, if given."""
    if config:
        options["quantization_config"] = qv.QuaverConfig(config[0], weights=config[1])
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def built(folder: Path, recipe: str, weights: str, device: torch.device) -> nn.Module:
    """The folder's model as `convert` makes it, on one device."""
    model = load(folder).to(device)
    qv.convert(model, named_recipe(recipe), weights=weights)
    return model


def split(devices: list[Any]) -> dict[str, Any]:
    """A device map: the second block on the second device."""
    first, second = devices
    places = {"model.embed_tokens": first, "model.layers.0": first, "model.layers.1": second}
    return places | {"model.norm": second, "model.rotary_emb": first, "lm_head": first}


def device_maps(devices: list[torch.device]) -> dict[str, Any]:
    """Device maps by name; "auto" would need a device that reports its memory."""
    return {
        "none": None,
        "one": {"": devices[1]},
        "names": split([str(device) for device in devices]),
        "two": split(devices),
        "cpu": split([devices[0], "cpu"]),
    }


def logits(model: nn.Module, ids: torch.Tensor, *, calibrated: bool = True) -> torch.Tensor:
    """Of a model that learns its scales from `ids` first, unless they come with it."""
    ids = ids.to(model.model.embed_tokens.weight.device)
    if not calibrated:
        calibrate(model, ids)
    with torch.no_grad():
        return model(ids).logits.cpu()


def rewrite(folder: Path, change: Any) -> None:
    """Change the dictionary of tensors in a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
