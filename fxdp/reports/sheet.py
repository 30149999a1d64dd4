"""Tables as values, displayed in a terminal by rich and in a notebook as HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import Environment
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000
_LONG = 24
"""Characters up to which a text stays in its row on a narrow terminal."""


@dataclass(frozen=True)
class Sheet:
    """A table of texts; `note` explains the absence of rows.

    Columns named `#...` hold numbers, and columns named `=...` hold words that a narrow terminal must not
    break; long texts stand below their row where they do not fit beside it. `total` is a last line about all
    rows; `style` is the style of the title in a terminal.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    total: tuple[str, ...] = ()
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        note = [Text(self.note)] if self.note else []
        if not self.rows:
            yield from (Text(self.title, "bold"), *note)
            return
        table = self._table()
        if console.measure(table, options=options.update(max_width=_UNBOUNDED)).maximum <= options.max_width:
            yield table
        else:
            yield from self._narrow() if self._long() else [table]
        yield from note

    def _table(self) -> Table:
        ruled = any("\n" in cell for row in self.rows for cell in row)
        table = Table(
            title=self.title, title_justify="left", title_style=self.style or None, show_lines=ruled
        )
        for name in self.columns:
            full = name.startswith(("#", "="))
            align: Literal["left", "right"] = "right" if name[:1] == "#" else "left"
            table.add_column(name.lstrip("#="), justify=align, no_wrap=full, overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        if self.total:
            table.add_section()
            table.add_row(*map(Text, self.total))
        return table

    def _narrow(self) -> Iterator[RenderableType]:
        """Yield the table with each long text in lines of its own, below its row."""
        numbers, long = [name[:1] == "#" for name in self.columns], self._long()
        names = [name.lstrip("#=") for name in self.columns]
        lines = [names, *self.rows, *([self.total] if self.total else [])]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]

        def beside(cells: Sequence[str], style: str = "") -> Text:
            shown = [
                cell.rjust(width) if number else cell.ljust(width)
                for i, (cell, width, number) in enumerate(zip(cells, widths, numbers, strict=True))
                if i not in long
            ]
            return Text("  ".join(shown).rstrip(), style)

        yield Text(self.title, self.style or "italic")
        yield beside(names, "bold")
        for row in self.rows:
            yield beside(row)
            below = Table.grid(padding=(0, 2))
            for i in long:
                below.add_row(Text(names[i], "dim"), Text(row[i]))
            yield Padding(below, (0, 0, 0, 2))
        if self.total:
            yield beside(self.total, "bold")

    def _long(self) -> list[int]:
        """Return the columns of words, the first aside, that do not fit beside others."""
        lengths = [max(len(row[i]) for row in self.rows) for i in range(len(self.columns))]
        return [
            i
            for i, name in enumerate(self.columns)
            if i and name[:1] not in ("#", "=") and lengths[i] > _LONG
        ]


_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<div style="font:13px system-ui,sans-serif">
{% for sheet in sheets %}
<p style="margin:.6em 0 .2em"><b>{{ sheet.title }}</b></p>
{% if sheet.rows %}
<table style="border-collapse:collapse;text-align:left">
<tr>{% for name in sheet.columns %}<th style="padding:2px 10px 2px 0;border-bottom:1px solid #8888">\
{{ name.lstrip('#=') }}</th>{% endfor %}</tr>
{% for row in sheet.rows + ((sheet.total,) if sheet.total else ()) %}
<tr>{% for cell in row %}<td style="padding:2px 10px 2px 0;vertical-align:top;white-space:pre-wrap\
{{ ';text-align:right' if sheet.columns[loop.index0].startswith('#') }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% if sheet.note %}
<p style="margin:.2em 0;opacity:.75;white-space:pre-wrap">{{ sheet.note }}</p>
{% endif %}
{% endfor %}
</div>
"""
)


def sheets_html(sheets: Sequence[Sheet]) -> str:
    """Render tables as a fragment of HTML."""
    return _TEMPLATE.render(sheets=sheets)


class Shown:
    """Base class of objects that are displayed as tables, in terminals and notebooks."""

    __slots__ = ()

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the tables of this object."""
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        return Group(*self.sheets())

    def _repr_html_(self) -> str:
        return sheets_html(self.sheets())
