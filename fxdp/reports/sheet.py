"""Tables as values, displayed in a terminal by rich and in a notebook as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult


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
        from fxdp.reports.drawn_sheet import drawn

        return drawn(self, console, options)


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

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(*self.sheets())

    def _repr_html_(self) -> str:
        return sheets_html(self.sheets())
