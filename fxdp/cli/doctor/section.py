"""Sections of plain text, 80 columns wide."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

_WIDTH, _NAME = 80, 20


@dataclass(frozen=True)
class Row:
    """A name with a text."""

    name: str
    text: str
    ok: bool = True
    """True if no fault was found."""


@dataclass(frozen=True)
class Section:
    """A title with rows."""

    title: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """True if all rows are ok."""
        return all(row.ok for row in self.rows)

    def lines(self) -> list[str]:
        """Return the section as text, each line at most 80 columns wide."""
        found = [self.title]
        for row in self.rows:
            name = f"  {row.name}".ljust(_NAME) if len(row.name) < _NAME - 2 else f"  {row.name} "
            text = " ".join(row.text.split() if row.ok else ("FAILED:", *row.text.split()))
            found += textwrap.wrap(
                text, _WIDTH, initial_indent=name, subsequent_indent=" " * _NAME, break_on_hyphens=False
            ) or [name.rstrip()]
        return found
