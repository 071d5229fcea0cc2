"""Train LoRA adapters on a model whose weights are FP8 and frozen, and merge them into it.

python examples/lora.py [nvfp4]
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import quaver as qv
from quaver.examples.tiny_llama import batches, bits, small_llama

STEPS = 40


@dataclass
class Result:
    """Losses in bits per byte, of each step and of a held-out batch; the adapter's files."""

    losses: list[float] = field(default_factory=list)
    apart: float = 0.0
    merged: float = 0.0
    files: list[str] = field(default_factory=list)


def run(recipe: str = "mxfp8", steps: int = STEPS) -> Result:
    """Load a base model quantized, train adapters, save them, merge them."""
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        small_llama().save_pretrained(folder)  # in place of one from a hub
        base = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=qv.QuaverConfig(recipe)
        )
        targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=targets))
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for ids in batches(steps):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(bits(loss.item()))
        model.eval().save_pretrained(Path(folder, "adapter"))
        result.files = sorted(file.name for file in Path(folder, "adapter").iterdir())
        (ids,) = batches(1, seed=1)
        with torch.no_grad():
            result.apart = bits(model(input_ids=ids, labels=ids).loss.item())
            plain = model.merge_and_unload()  # the sums are quantized anew: they round
            result.merged = bits(plain(input_ids=ids, labels=ids).loss.item())
    return result


def main(recipe: str = "mxfp8") -> None:
    """Print how the adapters learn, and what merging costs."""
    result = run(recipe)
    for step in range(0, STEPS, STEPS // 10):
        print(f"step {step:>3}: {result.losses[step]:.3f} bits per byte")
    print(f"held out: {result.apart:.4f}; after merging into {recipe} weights: {result.merged:.4f}")
    print("saved:", ", ".join(result.files))


if __name__ == "__main__":
    main(*sys.argv[1:2])
