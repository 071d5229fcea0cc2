"""The Triton kernels of block formats: their cases and sweeps in `benchmarks.bench_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from types import ModuleType

import torch
from rich.console import Console

from benchmarks.gpu import device_ms
from quaver.kernels import (
    block_cast,
    block_dequantize,
    hadamard,
    mx_cast,
    mx_dequantize,
    nvfp4_cast,
    nvfp4_dequantize,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Call = Callable[[], object]
Make = Callable[[torch.Tensor], Call]


def _block_dequantize(x: torch.Tensor) -> Call:
    data, scale_inv, _, _ = block_cast(x, E4M3, 1, True, 0.0, True, False)
    return lambda: block_dequantize(data, scale_inv, 1, torch.bfloat16)


def _mx_dequantize(x: torch.Tensor) -> Call:
    data, scale_inv, _, _ = mx_cast(x, E4M3, True, False)
    return lambda: mx_dequantize(data, scale_inv, torch.bfloat16)


def _nvfp4_dequantize(x: torch.Tensor) -> Call:
    data, scale, _, _, inverse = nvfp4_cast(x, False, False, 0, 0, True, False)
    return lambda: nvfp4_dequantize(data, scale, inverse, False, x.shape[1], torch.bfloat16)


def _block(dim: int, power_2: bool, columnwise: bool) -> Make:
    return lambda x: lambda: block_cast(x, E4M3, dim, power_2, 0.0, True, columnwise)


def _nvfp4(square: bool, stochastic: bool, columnwise: bool) -> Make:
    return lambda x: lambda: nvfp4_cast(x, square, stochastic, 1, 2, True, columnwise)


BLOCK_CASES: dict[str, tuple[float, Make, float | None]] = {
    "block 1x128, row-wise": (3.03, _block(1, True, False), None),
    "block 1x128, both": (4.06, _block(1, True, True), 0.182),
    "block 1x128, any scales, both": (4.06, _block(1, False, True), None),
    "block 128x128, both": (4, _block(2, True, True), 0.182),
    "block dequantize": (3.03, _block_dequantize, None),
    "MXFP8, row-wise": (3.03, lambda x: lambda: mx_cast(x, E4M3, True, False), None),
    "MXFP8, both": (4.06, lambda x: lambda: mx_cast(x, E4M3, True, True), None),
    "MXFP8 dequantize": (3.03, _mx_dequantize, None),
    "NVFP4, row-wise": (4.56, _nvfp4(False, False, False), None),
    "NVFP4, both": (5.13, _nvfp4(False, False, True), None),
    "NVFP4 16x16, both": (5.01, _nvfp4(True, False, True), None),
    "NVFP4 stochastic, both": (5.13, _nvfp4(False, True, True), None),
    "NVFP4 dequantize": (2.56, _nvfp4_dequantize, None),
    "Hadamard": (6, lambda x: lambda: hadamard(x), None),
    "Hadamard of the transpose": (6, lambda x: lambda: hadamard(x.t()), None),
}
"""Bytes moved for each value, from x [M, K] to the call, and the most ms for the largest shape."""


def _settings(
    modules: dict[str, ModuleType],
) -> Iterator[tuple[str, dict[tuple[ModuleType, str], list[object]]]]:
    """For each case that is swept, the values to be tried of each constant."""
    tile = modules["block"].Tile
    block, mx, nvfp4 = modules["block"], modules["mx"], modules["nvfp4"]
    whole = [tile(128, w, r) for w, r in ((4, 255), (8, 96), (8, 128), (8, 168), (16, 64))]
    neighbours = (modules["tiles"], "NEIGHBOURS")
    yield "block 1x128, both", {(block, "TILE"): [*whole], neighbours: [2, 4, 8]}
    yield "block 1x128, row-wise", {(block, "TILE"): [*whole]}
    yield "block 1x128, any scales, both", {(block, "TILE"): [*whole]}
    yield "block 128x128, both", {(block, "TILE"): [*whole]}
    small = [tile(s, w, 255) for s, w in ((32, 2), (64, 2), (64, 4), (64, 8), (128, 8))]
    yield "MXFP8, both", {(mx, "TILE"): [*small, tile(128, 8, 128)]}
    shapes: list[object] = [(r, c, 4) for r in (8, 16, 32) for c in (128, 256)]
    yield "block dequantize", {(modules["tiles"], "DEQUANTIZE_TILE"): shapes}
    for name in ("NVFP4, both", "NVFP4 stochastic, both"):
        yield name, {(nvfp4, "TILE"): [32, 64, 128], (nvfp4, "WARPS"): [2, 4, 8]}
    for name in ("Hadamard", "Hadamard of the transpose"):
        constants = {"ROWS": [4, 16], "BLOCKS": [8, 16], "WARPS": [4]}
        yield name, {(modules["hadamard"], k): [*v] for k, v in constants.items()}


def sweep_blocks(x: torch.Tensor, console: Console) -> None:
    """Try the constants of the block kernels on x; print the best of each."""
    names = {
        "tiles": "block_cast.triton_tiles",
        "block": "block_cast.triton",
        "mx": "mx_cast.triton",
        "nvfp4": "nvfp4_cast.triton",
        "hadamard": "hadamard.triton",
    }
    modules = {key: import_module(f"quaver.kernels.{name}") for key, name in names.items()}
    for case, settings in _settings(modules):
        call = BLOCK_CASES[case][1](x)
        chosen = [getattr(module, constant) for module, constant in settings]
        results = []
        for values in product(*settings.values()):
            for (module, constant), value in zip(settings, values, strict=True):
                setattr(module, constant, value)
            results.append((device_ms(call, 20), str(values)))
        for (module, constant), value in zip(settings, chosen, strict=True):
            setattr(module, constant, value)
        titles = ", ".join(constant for _, constant in settings)
        console.print(f"[bold]{case}[/bold]: {titles}, now {chosen}")
        for taken, values in sorted(results)[:6]:
            console.print(f"  {taken:.4f} ms  {values}", highlight=False)
