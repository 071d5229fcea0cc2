"""Train a small language model on bytes twice, in fp32 and with a recipe, and compare the two.

Both models start from the same weights and see the same batches. Each is split over the given
devices by plain ``.to``: with two, the first half of the blocks is on the first. Everything that
FP8 or FP4 asks for is here: ``qv.Linear`` for ``nn.Linear``, and one ``qv.autocast`` around the
forward, which names the recipe.

    python examples/train_bytes.py --help
"""

from __future__ import annotations

import math
import pydoc_data.topics
import runpy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import quaver as qv
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

VOCABULARY = 256
"""One token is one byte."""
WIDTH, HEADS, BLOCKS, CONTEXT = 96, 4, 4, 64
BATCH, WARMUP, LEARNING_RATE = 16, 40, 4e-3
STEPS = 500
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
LARGEST_GAPS = {name: 0.15 if name == "nvfp4" else 0.05 for name in RECIPES}
"""Bits per byte that a recipe may cost on held-out text after a full run."""


class Block(nn.Module):
    """Causal attention, then an MLP. The class of its four linears decides what can quantize."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, WIDTH], on any device, to the same shape on the block's own."""
        x = x.to(self.qkv.weight.device)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        widened: torch.Tensor = self.down(gelu(self.up(self.mlp_norm(x))))
        return x + widened


class ByteGPT(nn.Module):
    """A decoder of half a million parameters; the head stays in high precision, as is usual."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(linear) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def split(self, devices: Sequence[torch.device]) -> None:
        """Spread the blocks evenly; embeddings go with the first block, the head with the last."""
        places = [devices[i * len(devices) // BLOCKS] for i in range(BLOCKS)]
        for block, device in zip(self.blocks, places, strict=True):
            block.to(device)
        self.token.to(places[0])
        self.position.to(places[0])
        self.norm.to(places[-1])
        self.head.to(places[-1])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes [batch, time], int64, on the first device, to logits [batch, time, VOCABULARY]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Trainee:
    """A model with its optimizer, and what it went through; ``recipe`` is None for fp32."""

    name: str
    model: ByteGPT
    recipe: Recipe | None
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    held_out: float = math.nan

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean bits per byte of windows [batch, time + 1]: each byte from those before it."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with qv.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            logits = self.model(inputs.to(self.model.token.weight.device))
        nats = cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device))
        return nats / math.log(2)

    def step(self, windows: torch.Tensor, learning_rate: float) -> None:
        """One step of training."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.loss(windows)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Report:
    """What a run found: bits per byte on held-out text, and the way there."""

    full: Trainee
    quantized: Trainee

    @property
    def gap(self) -> float:
        """Bits per byte that the recipe costs on held-out text; negative where it wins by luck."""
        return self.quantized.held_out - self.full.held_out


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own documentation as bytes, int64: nine tenths to train on, the rest held out.

    Its topics quote each other; a paragraph is kept once, so that none is on both sides.
    """
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    data = torch.tensor(list("\n\n".join(dict.fromkeys(paragraphs)).encode()))
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def prepare(devices: Sequence[torch.device], seed: int, recipe: str = "delayed") -> Report:
    """The two models, equal bit for bit and split over ``devices``, before any training.

    ``recipe`` is one of RECIPES. Raises ValueError unless there are between one and BLOCKS devices.
    """
    if not 1 <= len(devices) <= BLOCKS:
        raise ValueError(f"{BLOCKS} blocks go on 1 to {BLOCKS} devices, not on {len(devices)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        full, quantized = ByteGPT(nn.Linear), ByteGPT(qv.Linear)
    quantized.load_state_dict(full.state_dict())
    for model in (full, quantized):
        model.split(devices)
    optimizers = [
        torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
        for model in (full, quantized)
    ]
    return Report(
        Trainee("fp32", full, None, optimizers[0]),
        Trainee(recipe, quantized, RECIPES[recipe], optimizers[1]),
    )


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, under a cosine that ends at zero."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * cosine


def train(
    trainees: Sequence[Trainee], steps: int, seed: int, console: Console | None = None
) -> None:
    """Train models side by side on the same batches, then measure them on held-out text.

    Progress goes to ``console``, if one is given.
    """
    text, held_out = (part.unfold(0, CONTEXT + 1, 1) for part in read_text())
    generator = torch.Generator().manual_seed(seed)
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("bits per byte: {task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=console is None) as progress:
        task = progress.add_task("", total=steps)
        for step in range(steps):
            windows = text[torch.randint(len(text), (BATCH,), generator=generator)]
            for trainee in trainees:
                trainee.step(windows, learning_rate(step, steps))
            now = ", ".join(f"{trainee.name} {trainee.losses[-1]:.3f}" for trainee in trainees)
            progress.update(task, advance=1, description=now)
    with torch.no_grad():
        for trainee in trainees:
            trainee.held_out = trainee.loss(held_out[::CONTEXT]).item()


def run(
    devices: Sequence[torch.device],
    steps: int = STEPS,
    seed: int = 0,
    recipe: str = "delayed",
    console: Console | None = None,
) -> Report:
    """What ``prepare`` makes, trained; raises ValueError as it does."""
    report = prepare(devices, seed, recipe)
    train((report.full, report.quantized), steps, seed, console)
    return report


def make_table(report: Report) -> Table:
    """The two runs next to each other, and where their blocks were."""
    limit = LARGEST_GAPS[report.quantized.name]
    verdict = "under" if report.gap < limit else "OVER"
    table = Table(
        title=f"A byte-level GPT of {count_parameters(report.full.model):,} parameters",
        caption=f"gap {report.gap:+.4f} bits per byte, {verdict} the limit of {limit} "
        f"(for {STEPS} steps)\nblocks on {', '.join(block_devices(report.quantized.model))}",
    )
    for column in ("", "held-out bits per byte", "first batch", "last batch", "ms per step"):
        table.add_column(column, justify="right" if column else "left")
    for trainee in (report.full, report.quantized):
        losses = trainee.losses
        figures = (trainee.held_out, losses[0], losses[-1])
        milliseconds = 1000 * trainee.seconds / len(losses)
        cells = [*(f"{figure:.4f}" for figure in figures), f"{milliseconds:.1f}"]
        table.add_row(trainee.name, *cells)
    return table


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def block_devices(model: ByteGPT) -> list[str]:
    """The device of each block, in order."""
    return [str(next(block.parameters()).device) for block in model.blocks]


if __name__ == "__main__":
    # `quaver train-demo` finds the devices and calls `run` above; this is the same command.
    runpy.run_module("quaver.cli.train_demo", run_name="__main__")
