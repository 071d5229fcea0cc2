"""The Triton kernels on a GPU, against a copy on the device that moves as many bytes.

    python -m benchmarks.bench_kernels
    python -m benchmarks.bench_kernels --sweep   # tile sizes and warps; prints the best

A copy is what the memory gives; a kernel that reads and writes each value once cannot beat it. The
host's time is that of a call on a tiny tensor, which the GPU finishes before the next one comes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.block_kernels import BLOCK_CASES, sweep_blocks
from benchmarks.common import Report, command_line
from benchmarks.fused_kernels import FUSED_CASES, sweep_fused
from benchmarks.gpu import describe_gpu, device_ms, host_us
from quaver.kernels import amax, cast, cast_grad, current_cast, dequantize, scale_update

SHAPES = ((16384, 8192), (8192, 4096))
TINY = (32, 256)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel on a bfloat16 matrix.

    Attributes:
        moved: bytes that it reads and writes for each value.
        make: from x [M, K] to the call that is timed.
        target: the most ms for the first of SHAPES.
    """

    moved: float
    make: Callable[[torch.Tensor], Call]
    target: float | None = None


def _cast(x: torch.Tensor, columnwise: bool) -> Call:
    scale, seen = torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device)
    return lambda: cast(x, scale, seen, None, 0, E4M3, columnwise)


def _unset_cast(x: torch.Tensor) -> Call:
    scale, seen = torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device)
    ready = torch.zeros(1, device=x.device)
    return lambda: cast(x, scale, seen, ready, 0, E4M3, True)


def _cast_grad(x: torch.Tensor) -> Call:
    scale, seen = torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device)
    return lambda: cast_grad(x, scale, seen, None, 0, E5M2, True)


def _amax(x: torch.Tensor) -> Call:
    seen = torch.zeros(1, device=x.device)
    return lambda: amax(x, seen, 0)


def _dequantize(x: torch.Tensor) -> Call:
    data, one = x.to(E4M3), torch.ones(1, device=x.device)
    return lambda: dequantize(data, one, torch.bfloat16)


# To time another kernel, add it here.
CASES: dict[str, Case] = {
    "cast + amax": Case(3, lambda x: _cast(x, False)),
    "cast + transpose + amax": Case(4, lambda x: _cast(x, True), target=0.140),
    "cast + transpose + amax, scale never set": Case(6, _unset_cast),
    "cast + transpose + amax + bias gradient": Case(4, _cast_grad),
    "amax": Case(2, _amax),
    "current cast": Case(5, lambda x: lambda: current_cast(x, E4M3, False, 0.0, None, False)),
    "current cast + transpose": Case(
        6, lambda x: lambda: current_cast(x, E4M3, False, 0.0, None, True), target=0.205
    ),
    "dequantize": Case(3, _dequantize),
} | {name: Case(*case) for name, case in (BLOCK_CASES | FUSED_CASES).items()}


def _matrix(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def measure(device: torch.device) -> Iterator[list[str]]:
    """A row for each case and shape, each beside its copy."""
    for name, case in CASES.items():
        host = host_us(case.make(_matrix(TINY, device)))
        for shape in SHAPES:
            x = _matrix(shape, device)
            moved = case.moved * x.numel()
            source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=device)
            into = torch.empty_like(source)
            copied = device_ms(lambda a=into, b=source: a.copy_(b))
            taken = device_ms(case.make(x))
            target = f"{case.target:.3f}" if case.target and shape == SHAPES[0] else ""
            yield [
                f"{name}, {shape[0]}x{shape[1]}",
                f"{taken:.4f}",
                target,
                f"{moved / taken / 1e6:.0f}",
                f"{taken / copied:.2f}",
                f"{host:.1f}",
            ]
    yield _update_row(device)


def _update_row(device: torch.device, states: int = 224) -> list[str]:
    """The scale update of a model of 32 layers with 7 linears each."""
    histories = [torch.rand(1024, 3, device=device) for _ in range(states)]
    scales = [torch.ones(3, device=device) for _ in range(states)]
    readies = [torch.zeros(3, device=device) for _ in range(states)]
    amaxes = torch.rand(3 * states, device=device) + 0.1  # a slot without any is passed over

    def call() -> None:
        scale_update(histories, scales, readies, amaxes, 448.0, "max")

    taken, host = device_ms(call), host_us(call, 50)
    return [f"scale update of {states} states", f"{taken:.4f}", "", "", "", f"{host:.1f}"]


def sweep(device: torch.device, console: Console) -> None:
    """Try tiles and warps of the cast and the amax; print the best of each."""
    from quaver.kernels.common import triton_cast, triton_tiles
    from quaver.kernels.common.triton_tiles import Tile

    x = _matrix(SHAPES[0], device)
    sizes = (16, 32, 64, 128, 256)
    square = [Tile(r, c, w) for r in sizes for c in sizes for w in (4, 8, 16)]
    flat = [Tile(r, c, w) for r in (1, 4, 16) for c in (512, 1024, 2048, 4096) for w in (4, 8)]
    line = [Tile(1, c, w) for c in (2048, 4096, 8192, 16384) for w in (4, 8, 16)]
    for module, constant, tiles, call in (
        (triton_cast, "BOTH_TILE", square, _cast(x, True)),
        (triton_cast, "BOTH_TILE", square, _cast_grad(x)),
        (triton_cast, "ROWWISE_TILE", flat, _cast(x, False)),
        (triton_tiles, "AMAX_FLAT_TILE", line, _amax(x)),
    ):
        chosen = getattr(module, constant)
        results = []
        for tile in tiles:
            if 16 <= tile.rows * tile.columns // (32 * tile.warps) <= 128:
                setattr(module, constant, tile)
                results.append((device_ms(call, 20), tile))
        setattr(module, constant, chosen)
        console.print(f"[bold]{constant}[/bold], now {tuple(chosen)}: rows, columns, warps")
        for taken, tile in sorted(results)[:6]:
            console.print(f"  {taken:.4f} ms  {tuple(tile)}", highlight=False)
    chosen_parts, call = triton_tiles.PARTS, CASES["current cast + transpose"].make(x)
    for parts in (256, 512, 1024, 2048, 4096):
        triton_tiles.PARTS = triton_cast.PARTS = parts
        console.print(f"  PARTS {parts}: current cast {device_ms(call):.4f} ms", highlight=False)
    triton_tiles.PARTS = triton_cast.PARTS = chosen_parts
    sweep_blocks(x, console)
    sweep_fused(x, console)


def main() -> None:
    """Measure, print, and write the dated report; or sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try tile sizes instead")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_kernels needs a CUDA GPU\n")
    torch.cuda.set_device(options.device)
    torch.manual_seed(0)
    console = Console()
    if options.sweep:
        sweep(options.device, console)
        return
    report = Report(
        name="kernels",
        title="Triton kernels, bfloat16",
        command=command_line("benchmarks.bench_kernels"),
        columns=["", "median ms", "target", "GB/s", "in copies", "host µs"],
        rows=list(measure(options.device)),
        notes=[
            "In copies: against a copy on the device that moves the same bytes. GB/s counts what "
            "must be read and written; x twice where its amax has to be known first.",
            *describe_gpu(),
        ],
    )
    report.show(console)
    console.print(f"written to {report.write()}", soft_wrap=True)


if __name__ == "__main__":
    main()
