"""Linear on a GPU, forward and backward, in every recipe, against nn.Linear in bf16 and torchao.

    python -m benchmarks.linear [--profile]

Times are medians of device events; host times are a wall clock over 300 calls on a tiny shape,
where the device has next to nothing to do.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import io
import pstats
from collections.abc import Callable

import torch
from rich.console import Console
from torch import nn

import quaver as qv
from benchmarks.common import Report, command_line
from benchmarks.gpu import describe_gpu, device_ms, host_us

SHAPES = ((16384, 8192, 8192), (8192, 4096, 14336), (8192, 4096, 4096))
TINY = (32, 256, 256)
RECIPES = {
    "delayed": qv.recipe.DelayedScaling(),
    "current": qv.recipe.Float8CurrentScaling(),
    "block": qv.recipe.Float8BlockScaling(),
    "mxfp8": qv.recipe.MXFP8BlockScaling(),
    "nvfp4": qv.recipe.NVFP4BlockScaling(),
}
TARGETS = {
    ((16384, 8192, 8192), "delayed"): 5.60,
    ((16384, 8192, 8192), "current"): 5.80,
    ((16384, 8192, 8192), "block"): 6.70,
    ((8192, 4096, 14336), "delayed"): 2.52,
    ((8192, 4096, 14336), "current"): 2.62,
    ((8192, 4096, 14336), "block"): 3.15,
    ((8192, 4096, 4096), "delayed"): 0.84,
    ((8192, 4096, 4096), "current"): 0.88,
    ((8192, 4096, 4096), "block"): 1.02,
}
HOST_TARGETS = {"delayed forward": 80.0, "delayed forward+backward": 300.0}
DEVICE = torch.device("cuda", 0)


class Case:
    """One layer with an input and a gradient.

    Args:
        shape: tokens, in_features, out_features.
        recipe: None: nn.Linear in bf16.
    """

    def __init__(self, shape: tuple[int, int, int], recipe: qv.recipe.Recipe | None) -> None:
        tokens, inputs, outputs = shape
        make = nn.Linear if recipe is None else qv.Linear
        options = {"bias": False, "dtype": torch.bfloat16, "device": DEVICE}
        self.layer: nn.Module = make(inputs, outputs, **options)
        self.recipe = recipe
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.x = torch.randn(
            tokens, inputs, device=DEVICE, dtype=torch.bfloat16, generator=generator
        ).requires_grad_()
        self.grad = torch.randn(
            tokens, outputs, device=DEVICE, dtype=torch.bfloat16, generator=generator
        )

    def forward(self) -> torch.Tensor:
        """One forward, in a region of its own as a training step has one."""
        if self.recipe is None:
            return self.layer(self.x)
        with qv.autocast(recipe=self.recipe):
            return self.layer(self.x)

    def inference(self) -> torch.Tensor:
        """One forward without grad."""
        with torch.no_grad():
            return self.forward()

    def step(self) -> None:
        """Forward and backward."""
        self.x.grad = self.layer.weight.grad = None
        self.forward().backward(self.grad)


def torchao_step(shape: tuple[int, int, int]) -> Callable[[], None] | None:
    """Forward and backward of torchao's tensor-wise float8 training, compiled; None without it."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.float8 import convert_to_float8_training

    case = Case(shape, None)
    container = nn.Sequential(case.layer)
    convert_to_float8_training(container)
    case.layer = torch.compile(container)
    weight = container[0].weight

    def step() -> None:
        case.x.grad = weight.grad = None
        case.forward().backward(case.grad)

    return step


def measure_device(names: list[str]) -> list[list[str]]:
    """A row a shape and implementation: ms, the ratio to bf16, the target."""
    rows = []
    for shape in SHAPES:
        label = " × ".join(map(str, shape))
        base = device_ms(Case(shape, None).step)
        rows.append([f"{label}, bf16 nn.Linear", f"{base:.3f}", "1.00", ""])
        for name in names:
            case = Case(shape, RECIPES[name])
            torch.cuda.reset_peak_memory_stats()
            ms = device_ms(case.step)
            target = TARGETS.get((shape, name))
            judged = "" if target is None else f"{target:.2f} {'✓' if ms <= target else '✗'}"
            rows.append([f"{label}, {name}", f"{ms:.3f}", f"{ms / base:.2f}", judged])
            del case
        peer = torchao_step(shape)
        if peer is not None:
            ms = device_ms(peer)
            rows.append([f"{label}, torchao compiled", f"{ms:.3f}", f"{ms / base:.2f}", ""])
    return rows


def measure_host(names: list[str]) -> list[list[str]]:
    """A row a function: µs a call, the ratio to nn.Linear's, the target."""
    plain = Case(TINY, None)
    bases = {"forward": host_us(plain.forward), "forward+backward": host_us(plain.step)}
    rows = [[f"host, bf16 nn.Linear {k}", f"{v:.0f} µs", "1.00", ""] for k, v in bases.items()]
    for name in names:
        case = Case(TINY, RECIPES[name])
        functions = {
            "forward": case.forward,
            "forward+backward": case.step,
            "forward, no_grad": case.inference,
        }
        case.step()
        for kind, function in functions.items():
            us = host_us(function)
            target = HOST_TARGETS.get(f"{name} {kind}")
            judged = "" if target is None else f"{target:.0f} {'✓' if us <= target else '✗'}"
            base = bases.get(kind)
            ratio = "" if base is None else f"{us / base:.2f}"
            rows.append([f"host, {name} {kind}", f"{us:.0f} µs", ratio, judged])
    return rows


def show_profile(name: str, console: Console) -> None:
    """Where the host time of a step goes, and which kernels the device runs."""
    case = Case(TINY, RECIPES[name])
    for _ in range(20):
        case.step()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(300):
        case.step()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(35)
    console.print(text.getvalue(), highlight=False, markup=False)
    big = Case(SHAPES[1], RECIPES[name])
    big.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
        for _ in range(5):
            big.step()
        torch.cuda.synchronize()
    table = kernels.key_averages().table(
        sort_by="cuda_time_total", row_limit=14, max_name_column_width=60
    )
    console.print(table, highlight=False, markup=False)


def main() -> None:
    """Measure, print, and write the dated report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=["delayed", "current", "block"])
    parser.add_argument("--profile", action="store_true", help="show profiles instead of timings")
    parser.add_argument("--host-only", action="store_true")
    options = parser.parse_args()
    console = Console(width=200)
    if options.profile:
        for name in options.recipes:
            show_profile(name, console)
        return
    rows = measure_host(options.recipes)
    if not options.host_only:
        rows = measure_device(options.recipes) + rows
    report = Report(
        name="linear",
        title="Linear on one GPU, forward + backward, bf16 input with grad, no bias",
        command=command_line("benchmarks.linear"),
        columns=["tokens × in × out", "median ms", "of bf16", "target"],
        rows=rows,
        notes=[*describe_gpu(), "host: tokens × in × out 32 × 256 × 256, 300 calls a figure"],
    )
    report.show(console)
    console.print(f"written to {report.write()}", soft_wrap=True)


if __name__ == "__main__":
    main()
