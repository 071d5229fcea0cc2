"""A script written for TransformerEngine, which knows nothing of Quaver.

It trains a small language model to repeat what it was shown, in FP8. Without a GPU, or without
TransformerEngine:

    python -m quaver.shim examples/te_script.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.nn.functional import cross_entropy
from transformer_engine.common.recipe import DelayedScaling, Format

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
LENGTH, BATCH = 8, 32


class Model(nn.Module):
    """Embedding, transformer layers, and a linear head; tokens are [length, batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(2 * LENGTH, 1, WIDTH))
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                4 * WIDTH,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                layer_number=i + 1,
                self_attn_mask_type="causal",
            )
            for i in range(LAYERS)
        )
        self.norm = te.LayerNorm(WIDTH)
        self.head = te.Linear(WIDTH, VOCABULARY, bias=True)

    def forward(self, tokens: torch.Tensor, recipe: DelayedScaling) -> torch.Tensor:
        """The logits of the next tokens, [length, batch, vocabulary]."""
        x = self.embedding(tokens) + self.position[: tokens.shape[0]]
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            for layer in self.layers:
                x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Model()
    device = model.head.weight.device
    model.to(device)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3)
    for step in range(steps):
        shown = torch.randint(0, VOCABULARY, (LENGTH, BATCH))
        tokens = torch.cat((shown, shown)).to(device)
        logits = model(tokens[:-1], recipe)[LENGTH - 1 :]
        loss = cross_entropy(logits.flatten(0, 1), tokens[LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")
    first: Any = model.layers[0]
    scales = first.self_attention.proj.fp8_meta["scaling_fwd"].scale.tolist()
    print("scales of the first projection (input, weight, output):", scales)
    return float(loss.item())


if __name__ == "__main__":
    main()
