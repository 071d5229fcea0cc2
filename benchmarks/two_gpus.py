"""A Llama-3-8B-shaped model over two GPUs against one: `python -m benchmarks.two_gpus`.

Four `qv.TransformerLayer`s, forward + backward, bfloat16, batch 2 × 4096 tokens, causal. Split
means naive model parallelism: the first half of the layers on one GPU, the second on the other,
which work by turns; so the split costs the copies between them, and gains memory, not time. Host
times are of a 32×256×256 `qv.Linear`, where the device has next to nothing to do.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn

import quaver as qv
from benchmarks.common import Report, command_line, time_interleaved
from benchmarks.gpu import CALLS, describe_gpu, host_us
from quaver.devices import on_device, pin, synchronize, unpin
from quaver.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": qv.recipe.DelayedScaling(),
    "current": qv.recipe.Float8CurrentScaling(),
    "block": qv.recipe.Float8BlockScaling(),
}
TINY = (32, 256, 256)
Row = list[str]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch."""

    layers: int = 4
    batch: int = 2
    length: int = 4096
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.length


class Model(nn.Module):
    """Layers, each on its device; activations go where the next layer is."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            qv.TransformerLayer(
                shape.hidden,
                shape.ffn,
                shape.heads,
                num_gqa_groups=shape.groups,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                device=device,
                dtype=torch.bfloat16,
            )
            for _ in range(shape.layers)
        )
        self.places = [device] * shape.layers

    def split(self, devices: Sequence[torch.device]) -> Model:
        """Move the layers to `devices`, the same number to each; returns itself."""
        self.places = [
            devices[i * len(devices) // len(self.layers)] for i in range(len(self.layers))
        ]
        for layer, place in zip(self.layers, self.places, strict=True):
            layer.to(place)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers on x [batch, length, hidden]."""
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x.to(place))
        return x


def training_step(
    model: Model, x: torch.Tensor, recipe: Recipe | None
) -> Callable[[], torch.Tensor]:
    """A forward and backward pass of `model`, waited for on all its devices; gives the output."""
    grad = torch.randn_like(x).to(model.places[-1])

    def step() -> torch.Tensor:
        model.zero_grad()
        x.grad = None
        with nullcontext() if recipe is None else qv.autocast(recipe=recipe):
            y: torch.Tensor = model(x)
        y.backward(grad)
        for device in dict.fromkeys(model.places):
            synchronize(device)
        return y.detach()

    return step


def throughput(
    devices: list[torch.device], shape: Shape, names: Sequence[str], repeats: int
) -> list[Row]:
    """Two rows a recipe: tokens a second on the first of `devices` alone, and on both.

    Each says whether the split model's first output is that of one GPU, bit for bit.

    Raises:
        ArithmeticError: a gradient is missing or not finite.
    """
    rows = []
    for name in names:
        whole = Model(shape, devices[0])
        models = {"one GPU": whole, "two GPUs": copy.deepcopy(whole).split(devices)}
        x = torch.randn(
            shape.batch, shape.length, shape.hidden, device=devices[0], dtype=torch.bfloat16
        ).requires_grad_()
        steps = {key: training_step(model, x, RECIPES[name]) for key, model in models.items()}
        outputs = [step().cpu() for step in steps.values()]
        same = "same output" if torch.equal(*outputs) else "ANOTHER OUTPUT"
        for key, model in models.items():
            if not all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
                raise ArithmeticError(f"{name}, {key}: a gradient is missing or not finite")
        timings = time_interleaved(steps, repeats=repeats, warm_up=3)
        for key, timing in timings.items():
            rate = shape.tokens / timing.milliseconds * 1000
            figure = f"{timing.milliseconds:.2f} ms, {rate:,.0f} tokens/s, {same}"
            rows.append([f"{name}, {key}", figure, f"{timing.ratio(timings['one GPU']):.3f}"])
    return rows


def guard_cost(devices: list[torch.device], names: Sequence[str], calls: int = CALLS) -> list[Row]:
    """Host time of a call on the second of `devices`: while it is current, and while it is not."""
    there = devices[1]

    def wait() -> None:
        synchronize(there)

    functions: dict[str, Callable[[], object]] = {
        "the guard itself": lambda: unpin(there, pin(there))
    }
    for name in names:
        forward, step = _tiny(there, RECIPES[name])
        functions |= {f"{name}, forward": forward, f"{name}, forward + backward": step}
    rows = []
    for label, function in functions.items():
        with on_device(there):
            base = host_us(function, calls, wait)
        with on_device(devices[0]):
            other = host_us(function, calls, wait)
        ratio = f"{other / base:.3f}"
        rows.append([f"host, {label}, its GPU current", f"{base:.2f} µs", "1.000"])
        rows.append([f"host, {label}, the other GPU current", f"{other:.2f} µs", ratio])
    return rows


def _tiny(
    device: torch.device, recipe: Recipe | None
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """Forward, and forward + backward, of a layer in which the host is all that counts."""
    tokens, inputs, outputs = TINY
    make = nn.Linear if recipe is None else qv.Linear
    layer = make(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        with nullcontext() if recipe is None else qv.autocast(recipe=recipe):
            y: torch.Tensor = layer(x)
        return y

    def step() -> None:
        x.grad = layer.weight.grad = None
        forward().backward(grad)

    return forward, step


def main() -> None:
    """Measure, print, and write the dated report."""
    parser = argparse.ArgumentParser(prog="two_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--host-only", action="store_true")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.exit(2, "two_gpus needs two CUDA GPUs\n")
    devices = [torch.device("cuda", i) for i in range(2)]
    torch.manual_seed(0)
    rows = []
    if not options.host_only:
        rows += throughput(devices, Shape(), options.recipes, options.repeats)
    rows += guard_cost(devices, options.recipes)
    peers = torch.cuda.can_device_access_peer(*devices)
    report = Report(
        name="two-gpus",
        title="A Llama-3-8B-shaped model of 4 layers over two GPUs, and the guard's host time",
        command=command_line("benchmarks.two_gpus"),
        columns=["", "median", "time, of its base"],
        rows=rows,
        notes=[
            " ".join((__doc__ or "").split("\n\n")[1].split()),
            "Same output: that of the split model equals that of one GPU, bit for bit.",
            f"Two such GPUs, with{'' if peers else 'out'} peer access.",
            *describe_gpu(),
        ],
    )
    report.show(Console(width=120))
    report.write()


if __name__ == "__main__":
    main()
