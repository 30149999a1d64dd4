"""Draw a table in a terminal, as wide as that is; the one file of the library's core that imports rich.

Importing rich draws from Python's random generator: a script by `fxdp run` that seeds, and then imports rich,
has one device's numbers only if nothing has imported rich before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fxdp.reports.sheet import Sheet

_UNBOUNDED = 10_000
_LONG = 24
"""Characters up to which a text stays in its row on a narrow terminal."""


def drawn(sheet: Sheet, console: Console, options: ConsoleOptions) -> RenderResult:
    """Yield a sheet as a table; on a narrow terminal, long texts below their rows."""
    note = [Text(sheet.note)] if sheet.note else []
    if not sheet.rows:
        yield from (Text(sheet.title, "bold"), *note)
        return
    table = _table(sheet)
    if console.measure(table, options=options.update(max_width=_UNBOUNDED)).maximum <= options.max_width:
        yield table
    else:
        yield from _narrow(sheet) if _long(sheet) else [table]
    yield from note


def _table(sheet: Sheet) -> Table:
    ruled = any("\n" in cell for row in sheet.rows for cell in row)
    table = Table(title=sheet.title, title_justify="left", title_style=sheet.style or None, show_lines=ruled)
    for name in sheet.columns:
        full = name.startswith(("#", "="))
        align: Literal["left", "right"] = "right" if name[:1] == "#" else "left"
        table.add_column(name.lstrip("#="), justify=align, no_wrap=full, overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    if sheet.total:
        table.add_section()
        table.add_row(*map(Text, sheet.total))
    return table


def _narrow(sheet: Sheet) -> Iterator[RenderableType]:
    """Yield the table with each long text in lines of its own, below its row."""
    numbers, long = [name[:1] == "#" for name in sheet.columns], _long(sheet)
    names = [name.lstrip("#=") for name in sheet.columns]
    lines = [names, *sheet.rows, *([sheet.total] if sheet.total else [])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]

    def beside(cells: Sequence[str], style: str = "") -> Text:
        shown = [
            cell.rjust(width) if number else cell.ljust(width)
            for i, (cell, width, number) in enumerate(zip(cells, widths, numbers, strict=True))
            if i not in long
        ]
        return Text("  ".join(shown).rstrip(), style)

    yield Text(sheet.title, sheet.style or "italic")
    yield beside(names, "bold")
    for row in sheet.rows:
        yield beside(row)
        below = Table.grid(padding=(0, 2))
        for i in long:
            below.add_row(Text(names[i], "dim"), Text(row[i]))
        yield Padding(below, (0, 0, 0, 2))
    if sheet.total:
        yield beside(sheet.total, "bold")


def _long(sheet: Sheet) -> list[int]:
    """Return the columns of words, the first aside, that do not fit beside others."""
    lengths = [max(len(row[i]) for row in sheet.rows) for i in range(len(sheet.columns))]
    return [
        i for i, name in enumerate(sheet.columns) if i and name[:1] not in ("#", "=") and lengths[i] > _LONG
    ]
