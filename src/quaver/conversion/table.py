"""Tables as plain text, for reports on models: equal layers of a model share a row."""

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 120
UNBROKEN = 32
"""Texts up to this length stay on one line; a table is made wider for them."""


def render(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as plain text, columns without content left out; names in the first one stay whole.

    Rows that differ in a number in their name only are one: "layers.0-31.mlp.up_proj". A name that
    is empty is that of the model itself.
    """
    cells = [(row[0] or "(the model itself)", *row[1:]) for row in gathered(rows)]
    used = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    table = Table(title=title, title_justify="left", title_style="")
    needed = 3 * len(used) + 1  # the lines between, and spaces
    for i in used:
        widest = max(len(columns[i]), *(len(row[i]) for row in cells))
        wraps = i > 0 and widest > UNBROKEN
        table.add_column(columns[i], overflow="fold", no_wrap=not wraps)
        needed += UNBROKEN if wraps else widest
    for row in cells:
        table.add_row(*(row[i] for i in used))
    buffer = StringIO()
    console = Console(file=buffer, width=max(TABLE_WIDTH, needed), markup=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().split("\n"))


def gathered(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """The rows, those one for which all but one number in the (dotted) first cell is the same.

    Numbers are gathered from the last of a name to the first, so that the experts of a layer are
    one row, and then those of all layers. A row stands where its first one stood.
    """
    found = list(rows)
    depth = max((row[0].count(".") + 1 for row in found), default=0)
    for place in reversed(range(depth)):
        groups: dict[object, list[Sequence[str]]] = {}
        for row in found:
            parts = row[0].split(".")
            numbered = place < len(parts) and parts[place].isdecimal()
            rest = (*parts[:place], "", *parts[place + 1 :]) if numbered else row[0]
            groups.setdefault((numbered, rest, *row[1:]), []).append(row)
        found = [_gather(group, place) for group in groups.values()]
    return found


def _gather(group: list[Sequence[str]], place: int) -> Sequence[str]:
    """One row for a group whose names differ in the number at `place` at most."""
    if len(group) == 1:
        return group[0]
    parts = group[0][0].split(".")
    if parts[place].isdecimal():
        parts[place] = _spans(sorted({int(row[0].split(".")[place]) for row in group}))
    return (".".join(parts), *group[0][1:])


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, in short: "0-3,7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
