"""The demo's tables for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from quaver.cli.demo.layers import LayerError
from quaver.cli.demo.result import DemoResult
from quaver.conversion import ConversionReport

WORST_LAYERS = 10
_MIB = 2**20


def print_report(results: Sequence[DemoResult], console: Console) -> None:
    """Print the tables, and what did not go as a rule goes.

    For one recipe its figures, the devices and the worst layers; for several a row for each.
    """
    first = results[0]
    if len(results) == 1:
        console.print(Group(_figures(first), _devices(first), _layers(first.layers)))
    else:
        console.print(Group(_recipes(results), _devices(first)))
    for note in dict.fromkeys(note for each in results for note in _exceptions(each.conversion)):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _recipes(results: Sequence[DemoResult]) -> Table:
    full = results[0]
    title = (
        f"Against full precision: perplexity {full.comparison.perplexity_full:.3f}, weights "
        f"{_size(full.weight_bytes_full)}, {full.comparison.tokens} tokens"
    )
    table = _table(title, "recipe", "perplexity", "ratio", "mean KL", "top-1", "MiB", "split")
    for result in results:
        figures = result.comparison
        table.add_row(
            result.recipe,
            f"{figures.perplexity_fp8:.3f}",
            f"{figures.perplexity_ratio:.4f}",
            f"{figures.kl_mean:.5f}",
            f"{figures.top1_agreement:.2%}",
            f"{result.weight_bytes_fp8 / _MIB:.1f}",
            _equality(result),
        )
    return table


def _figures(result: DemoResult) -> Table:
    figures = result.comparison
    table = _table(
        f"{result.recipe} against full precision, {figures.tokens} tokens",
        "",
        "full",
        result.recipe,
    )
    ratio = f"× {figures.perplexity_ratio:.4f}"
    table.add_column("", justify="right")
    table.add_row(
        "perplexity", f"{figures.perplexity_full:.3f}", f"{figures.perplexity_fp8:.3f}", ratio
    )
    full, fp8 = result.weight_bytes_full, result.weight_bytes_fp8
    table.add_row("weights", _size(full), _size(fp8), f"× {fp8 / full:.3f}")
    table.add_row("mean KL", "", f"{figures.kl_mean:.5f}", "nats a token")
    table.add_row("top-1 agreement", "", f"{figures.top1_agreement:.2%}", "of tokens")
    table.add_row("split equals unsplit", "", _equality(result), "logits")
    return table


def _equality(result: DemoResult) -> str:
    if result.split_equals_unsplit:
        return "[green]bit for bit[/]" if len(result.devices) > 1 else "not split"
    if len({share.device.split(":")[0] for share in result.devices}) > 1:
        return "[yellow]no: two kinds of device round differently[/]"
    return "[red]NO[/]"


def _devices(result: DemoResult) -> Table:
    what = "split model" if len(result.devices) > 1 else "model, not split"
    table = _table(f"The {what} ({result.recipe})", "device", "quantized layers", "peak memory")
    table.add_column("states live on", justify="left")
    for share in result.devices:
        peak = "not counted" if share.peak_bytes is None else _size(share.peak_bytes)
        table.add_row(share.device, str(share.layers), peak, ", ".join(share.scales))
    return table


def _layers(layers: list[LayerError]) -> Table:
    shown = layers[:WORST_LAYERS]
    title = f"Worst of {len(layers)} quantized layers, each alone on full-precision input"
    table = _table(title, "layer", "device", "relative error")
    for layer in shown:
        error = layer.relative_error
        shown_error = "not reached" if error is None else f"{error:.2%}"
        table.add_row(escape(layer.name), layer.device, shown_error)
    if layers[WORST_LAYERS:]:
        median = sorted(layer.relative_error or 0.0 for layer in layers)[len(layers) // 2]
        table.add_row("median of all", "", f"{median:.2%}")
    return table


def _exceptions(conversion: ConversionReport) -> list[str]:
    skipped = [f"{x.name} stays in full precision: {x.reason}" for x in conversion.skipped]
    bypassed = [f"{x.name} is not always quantized: {x.reason}" for x in conversion.bypassed]
    kept = [f"{x.name}: {x.note}" for x in conversion.converted if x.note]
    return skipped + bypassed + kept


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(first, title=title, title_justify="left", title_style="bold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _size(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
