"""Norms and activations in Triton: their cases and sweeps in `benchmarks.bench_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product

import torch
from rich.console import Console

from benchmarks.gpu import device_ms
from quaver.kernels import (
    activation,
    activation_backward_cast,
    activation_cast,
    norm,
    norm_backward,
    norm_cast,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5

Call = Callable[[], object]
Make = Callable[[torch.Tensor], Call]


def _parameters(x: torch.Tensor, rms: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    return weight, None if rms else torch.zeros_like(weight)


def _scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device)


def _norm(rms: bool) -> Make:
    def make(x: torch.Tensor) -> Call:
        weight, bias = _parameters(x, rms)
        return lambda: norm(x, weight, bias, EPS, False, rms, x.dtype)

    return make


def _norm_cast(rms: bool, columnwise: bool) -> Make:
    def make(x: torch.Tensor) -> Call:
        weight, bias = _parameters(x, rms)
        scale, seen = _scale(x)
        rest = (scale, seen, None, 0, E4M3, columnwise)
        return lambda: norm_cast(x, weight, bias, EPS, False, rms, *rest)

    return make


def _norm_backward(rms: bool) -> Make:
    def make(x: torch.Tensor) -> Call:
        weight, bias = _parameters(x, rms)
        _, mean, rstd = norm(x, weight, bias, EPS, False, rms, x.dtype)
        return lambda: norm_backward(x, x, weight, mean, rstd, False, rms)

    return make


def _activation(name: str) -> Make:
    return lambda x: lambda: activation(x, name, x.dtype)


def _activation_cast(name: str, columnwise: bool) -> Make:
    def make(x: torch.Tensor) -> Call:
        scale, seen = _scale(x)
        rest = (scale, seen, None, 0, E4M3, columnwise)
        return lambda: activation_cast(x, name, 7.0, 1.702, *rest)

    return make


def _activation_backward_cast(name: str, columnwise: bool) -> Make:
    def make(x: torch.Tensor) -> Call:
        grad = activation(x, name, x.dtype)
        scale, seen = _scale(x)
        rest = (scale, seen, None, 0, E5M2, columnwise)
        return lambda: activation_backward_cast(grad, x, name, 7.0, 1.702, *rest)

    return make


FUSED_CASES: dict[str, tuple[float, Make, float | None]] = {
    "layer norm": (4, _norm(False), None),
    "RMS norm": (4, _norm(True), None),
    "layer norm backward": (6, _norm_backward(False), None),
    "RMS norm backward": (6, _norm_backward(True), None),
    "RMS norm + cast + amax": (3, _norm_cast(True, False), None),
    "RMS norm + cast + transpose + amax": (4, _norm_cast(True, True), None),
    "SwiGLU": (3, _activation("swiglu"), None),
    "SwiGLU + cast + transpose + amax": (3, _activation_cast("swiglu", True), None),
    "SwiGLU backward + cast + transpose": (5, _activation_backward_cast("swiglu", True), None),
    "GELU + cast + transpose + amax": (4, _activation_cast("gelu", True), None),
    "GELU backward + cast + transpose": (6, _activation_backward_cast("gelu", True), None),
}
"""Bytes moved for each value of x [M, K], from x to the call, and the most ms if there is a target.

A norm's transpose is a second pass over the payload; the bytes counted are those of one pass.
"""


def sweep_fused(x: torch.Tensor, console: Console) -> None:
    """Try the constants of the norms and activations on x; print the best of each."""
    forward, backward, norms, norm_gradients, transpose, tiles = (
        import_module(f"quaver.kernels.{name}")
        for name in (
            "activation.triton",
            "activation.triton_backward",
            "norm.triton",
            "norm.triton_backward",
            "common.triton_transpose",
            "common.triton_tiles",
        )
    )
    tile = tiles.Tile
    squares = [tile(r, c, w) for r in (32, 64, 128) for c in (32, 64, 128) for w in (4, 8)]
    warps = {"VALUES_A_WARP": [512, 1024, 2048]}
    for case, module, constants in (
        ("SwiGLU + cast + transpose + amax", forward, {"TRANSPOSING_TILE": squares}),
        ("GELU + cast + transpose + amax", forward, {"TRANSPOSING_TILE": squares}),
        ("SwiGLU backward + cast + transpose", backward, {"CAST_TILE": squares}),
        ("RMS norm + cast + amax", norms, {**warps, "VALUES_A_PROGRAM": [4096, 16384]}),
        ("RMS norm backward", norm_gradients, {**warps, "PROGRAMS": [132, 264, 528, 1056]}),
        (
            "RMS norm + cast + transpose + amax",
            transpose,
            {"TILE": [64, 128, 256], "WARPS": [4, 8, 16]},
        ),
    ):
        call = FUSED_CASES[case][1](x)
        chosen = {name: getattr(module, name) for name in constants}
        results = []
        for values in product(*constants.values()):
            for name, value in zip(constants, values, strict=True):
                setattr(module, name, value)
            results.append((device_ms(call, 20), str(values)))
        for name, value in chosen.items():
            setattr(module, name, value)
        console.print(case, tuple(chosen.values()), *sorted(results)[:5])
