"""The reference path's forward of a Linear on the CPU, against the work that it cannot avoid.

    python -m benchmarks.reference_linear

The floor is what any FP8 linear does without an FP8 matrix product: torch's own cast of both
operands to FP8, and the product in the input's dtype. The rest is Quaver's: amaxes, scaling and
saturation before the casts, reading the payloads back, the recipe state and its update.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch.nn.functional import linear

import quaver as qv
from benchmarks.common import Report, command_line, time_interleaved

TOKENS, WIDTH = 512, 768
TARGET = 2.5
"""The most that the forward may cost in fp32, in floors."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def make_functions(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The floor, and the forward without and with grad, on the same operands."""
    recipe = qv.recipe.DelayedScaling()
    x = torch.randn(TOKENS, WIDTH, dtype=dtype)
    layer = qv.Linear(WIDTH, WIDTH, dtype=dtype)
    weight, bias = (parameter.detach() for parameter in layer.parameters())

    def product() -> object:
        return linear(x, weight, bias)

    def casts() -> object:
        return x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)

    def floor() -> object:
        return product(), casts()

    def with_grad() -> object:
        with qv.autocast(recipe=recipe):
            return layer(x)

    def without_grad() -> object:
        with torch.no_grad():
            return with_grad()

    with_grad()  # sets the scales, so that inference has them
    return {
        "product": product,
        "casts": casts,
        "floor": floor,
        "forward, no_grad": without_grad,
        "forward, grad": with_grad,
    }


def measure(repeats: int, warm_up: int) -> list[list[str]]:
    """A row for each dtype and function: ms, and how many floors that is."""
    rows = []
    for dtype, name in NAMES.items():
        timings = time_interleaved(make_functions(dtype), repeats=repeats, warm_up=warm_up)
        for function, timing in timings.items():
            ratio = timing.ratio(timings["floor"])
            rows.append([f"{name} {function}", f"{timing.milliseconds:.3f}", f"{ratio:.2f}"])
    return rows


def main() -> None:
    """Measure, print, and write the dated report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument(
        "--threads", type=int, help="default: torch's own; 1 is steadier on a busy machine"
    )
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = Report(
        name="reference-linear",
        title=f"Reference linear on the CPU, {TOKENS} tokens, {WIDTH} in, {WIDTH} out, with bias",
        command=command_line("benchmarks.reference_linear"),
        columns=["", "median ms", "in floors"],
        rows=measure(options.repeats, options.warm_up),
        notes=[
            f"Target: at most {TARGET} floors in fp32. The floor is the product and the casts "
            "together, called in one go; a ratio is the median over rounds of neighbours.",
            f"{options.repeats} rounds, each function once a round, each round in another order.",
        ],
    )
    console = Console()
    report.show(console)
    console.print(f"written to {report.write()}", soft_wrap=True)


if __name__ == "__main__":
    main()
