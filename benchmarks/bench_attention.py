"""Attention and a Llama-3-8B-shaped layer on a GPU: `python -m benchmarks.bench_attention`.

Times are medians of forward + backward in ms, bfloat16, batch 2 × 4096 tokens, 32 heads of 128 with
8 groups, causal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import quaver as qv
from benchmarks.common import Report, command_line
from benchmarks.gpu import describe_gpu, device_ms

BATCH, LENGTH, HEADS, GROUPS, CHANNELS = 2, 4096, 32, 8, 128
HIDDEN, FFN = HEADS * CHANNELS, 14336
CUDA = torch.device("cuda", 0)
RECIPES = {
    "bf16": None,
    "delayed": qv.recipe.DelayedScaling(),
    "current": qv.recipe.Float8CurrentScaling(),
    "block": qv.recipe.Float8BlockScaling(),
}


def random(*shape: int) -> torch.Tensor:
    """Normal values that require grad."""
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16).requires_grad_()


TARGETS = {"delayed": 12.0, "current": 12.8, "block": 14.2}
PEAK_GIB = 4.37


def step(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Callable[[], object]:
    """One forward and backward."""
    grad = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def kernels() -> dict[str, float]:
    """torch's attention by its kernels, on views of one projection's output."""
    qkv = random(BATCH, LENGTH, (HEADS + 2 * GROUPS) * CHANNELS)

    def views() -> list[torch.Tensor]:
        parts = qkv.split([h * CHANNELS for h in (HEADS, GROUPS, GROUPS)], -1)
        return [p.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for p in parts]

    def grouped() -> torch.Tensor:
        return functional.scaled_dot_product_attention(*views(), is_causal=True, enable_gqa=True)

    def repeated() -> torch.Tensor:
        q, k, v = views()
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = {"sdpa, torch's choice, grouped": device_ms(step(grouped, [qkv]))}
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for name, function in (("grouped", grouped), ("repeated", repeated)):
            try:
                with sdpa_kernel(kind):
                    found[f"sdpa, {kind.name}, {name}"] = device_ms(step(function, [qkv]))
            except RuntimeError as error:
                print(kind.name, name, str(error)[:200])
    return found


def parts() -> dict[str, float]:
    """Quaver's modules."""
    angles = qv.RotaryPositionEmbedding(CHANNELS, device=CUDA)(LENGTH)
    q, k = (random(BATCH, LENGTH, heads, CHANNELS) for heads in (HEADS, GROUPS))
    v = random(BATCH, LENGTH, GROUPS, CHANNELS)
    core = qv.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=GROUPS)

    def turned() -> torch.Tensor:
        return torch.cat([qv.apply_rotary_pos_emb(x, angles).flatten(2) for x in (q, k)], -1)

    found = {
        "DotProductAttention": device_ms(step(lambda: core(q, k, v), [q, k, v])),
        "rotary embedding of q and k": device_ms(step(turned, [q, k])),
    }
    return found


def layers() -> list[tuple[str, ...]]:
    """The whole layer, with and without rotary embedding."""
    layer = qv.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=CUDA,
        dtype=torch.bfloat16,
    )
    angles = qv.RotaryPositionEmbedding(CHANNELS, device=CUDA)(LENGTH)
    x = random(BATCH, LENGTH, HIDDEN)
    leaves = [x, *layer.parameters()]
    rows: list[tuple[str, ...]] = []
    for name, recipe in RECIPES.items():
        for rope in (None, angles):

            def forward(recipe=recipe, rope=rope) -> torch.Tensor:
                with qv.autocast(enabled=recipe is not None, recipe=recipe):
                    y: torch.Tensor = layer(x, rotary_pos_emb=rope)
                return y

            label = f"TransformerLayer, {name}{', rotary' if rope is not None else ''}"
            run = step(forward, leaves)
            if not all(g.isfinite().all() for g in run()):
                raise ArithmeticError(f"{label}: a gradient is not finite")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run()
            peak = torch.cuda.max_memory_allocated() / 2**30
            target = TARGETS.get(name) if rope is None else None
            ms = device_ms(run)
            judged = "" if target is None else f"{target} {'✓' if ms <= target else '✗'}"
            rows.append((label, f"{ms:.3f}", judged, f"{peak:.2f}"))
    return rows


def main() -> None:
    """Measure, print, and write the dated report."""
    parser = argparse.ArgumentParser(
        prog="bench_attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layer-only", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_attention needs a CUDA GPU\n")
    torch.manual_seed(0)
    pieces = () if options.layer_only else (kernels, parts)
    rows = [(name, f"{ms:.3f}", "", "") for group in pieces for name, ms in group().items()]
    rows += layers()
    report = Report(
        name="attention",
        title="Attention and a Llama-3-8B-shaped layer, forward + backward",
        command=command_line("benchmarks.bench_attention"),
        columns=["", "median ms", "target ms", "peak GiB"],
        rows=rows,
        notes=[
            " ".join((__doc__ or "").split("\n\n")[1].split()),
            f"Target for the peak of the layer without rotary embedding: {PEAK_GIB} GiB.",
            *describe_gpu(),
        ],
    )
    report.show(Console())
    report.write()


if __name__ == "__main__":
    main()
