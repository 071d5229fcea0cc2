"""What the GPU benchmarks share: timing by device events, and host time by a wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CALLS = 300


def device_ms(function: Callable[[], object], repeat_ms: int = 300) -> float:
    """The median time on the device, by events, the cache flushed between runs."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=repeat_ms, return_mode="median"))


def host_us(
    function: Callable[[], object],
    calls: int = CALLS,
    wait: Callable[[], object] = torch.cuda.synchronize,
) -> float:
    """Host time a call in µs: a wall clock over many calls, with no synchronization inside.

    Args:
        wait: for the device that has work of `function`; as it is, for the current GPU.
    """
    for _ in range(30):
        function()
    wait()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
        wait()
    return best / calls * 1e6


def describe_gpu() -> list[str]:
    """The GPU and what runs on it, a line each."""
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    return [
        f"GPU: {torch.cuda.get_device_name(index)}, {total / 2**30:.0f} GiB",
        f"CUDA {torch.version.cuda}, free at the end {free / 2**30:.0f} GiB",
    ]
