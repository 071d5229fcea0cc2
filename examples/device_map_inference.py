"""Load a model straight into FP8, spread over two devices, and compare it with the whole model.

``from_pretrained`` with a ``QuaverConfig`` quantizes each weight as it is read, on its own device,
so that the model is never in memory in full precision. Where a layer is changes no bit of it.

    python examples/device_map_inference.py [mxfp8]
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import quaver as qv
from quaver.conversion import ModelStatus
from quaver.examples.tiny_llama import batches, small_llama, two_devices


@dataclass(frozen=True)
class Result:
    """What was seen: the layers, and logits of the split model, a whole one, and full precision."""

    status: ModelStatus
    split: torch.Tensor
    whole: torch.Tensor
    full: torch.Tensor


def device_map(devices: list[torch.device]) -> dict[str, torch.device]:
    """The first half of the blocks with the embedding and the head, the second half apart."""
    first, second = devices
    places = {f"model.layers.{i}": first if i < 2 else second for i in range(4)}
    ends = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    return places | dict.fromkeys(ends, first)


def run(recipe: str = "current") -> Result:
    """Save a model, load it three times, and run it on one batch."""
    devices = two_devices()
    ids = next(batches(1)).to(devices[0])
    with tempfile.TemporaryDirectory() as folder:
        small_llama().save_pretrained(folder)  # in place of one from a hub

        def load(**options: Any) -> torch.nn.Module:
            model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, **options)
            return model

        split = load(quantization_config=qv.QuaverConfig(recipe), device_map=device_map(devices))
        whole = load(quantization_config=qv.QuaverConfig(recipe), device_map={"": devices[0]})
        full = load(device_map={"": devices[0]})
        models = (split, whole, full)
        if recipe == "delayed":  # its scales come from earlier values: show it some
            for model in models:
                with torch.no_grad(), qv.autocast(enabled=False, calibrating=True):
                    model(ids)
        with torch.no_grad():
            logits = [model(ids).logits.cpu() for model in models]
        return Result(qv.status(split), *logits)


def main(recipe: str = "current") -> None:
    """Print where each layer is, and how far its logits are from the others'."""
    result = run(recipe)
    print(result.status)
    print("split equals whole, bit for bit:", torch.equal(result.split, result.whole))
    error = (result.split - result.full).norm() / result.full.norm()
    print(f"{recipe}: logits differ from full precision's by {error:.2%} in the norm")


if __name__ == "__main__":
    main(*sys.argv[1:2])
