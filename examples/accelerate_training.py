"""Train a small Llama with accelerate, in full precision and in FP8, on the same batches.

To the loop of accelerate comes one line: ``qv.convert(model, recipe)``.

    python examples/accelerate_training.py [mxfp8]
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

import quaver as qv
from quaver.examples.tiny_llama import batches, bits, small_llama
from quaver.recipe import Recipe, named_recipe

STEPS = 40


def train(recipe: Recipe | None, steps: int = STEPS) -> list[float]:
    """The losses of ``steps`` steps, in bits per byte; in full precision without a recipe."""
    accelerator = Accelerator()
    model = small_llama().train()
    if recipe is not None:
        qv.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in batches(steps):
        ids = batch.to(accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss.item()))
    return losses


def main(recipe: str = "delayed") -> None:
    """Print the two runs next to each other."""
    full, quantized = train(None), train(named_recipe(recipe))
    print(f"{'step':>6} {'fp32':>8} {recipe:>8}   bits per byte")
    for step in (*range(0, STEPS, STEPS // 10), STEPS - 1):
        print(f"{step:>6} {full[step]:>8.3f} {quantized[step]:>8.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
