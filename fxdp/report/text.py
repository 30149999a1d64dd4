"""A plan as text: what is sent, how often, and because of which line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text


class CommunicationRow(Protocol):
    """What the table reads of a row of `Plan.communication`."""

    @property
    def op(self) -> str:
        """The collective."""

    @property
    def bytes(self) -> int:
        """Bytes that one rank hands in per step, all `count` of them together."""

    @property
    def count(self) -> int:
        """Collectives per step."""

    @property
    def cause(self) -> str:
        """Why it exists."""

    @property
    def site(self) -> str:
        """The user's line it comes from."""

    @property
    def phase(self) -> str:
        """`forward` or `backward`."""

    @property
    def by(self) -> str:
        """What carries it."""


def communication_table(rows: Sequence[CommunicationRow]) -> Table:
    """The collectives of one step, each with its cause; the last line is their sum."""
    table = Table(title="communication of one step", title_justify="left", show_footer=bool(rows))
    table.add_column("phase", footer="total", no_wrap=True)
    table.add_column("op", no_wrap=True)
    table.add_column("by", no_wrap=True)
    table.add_column("count", footer=str(sum(row.count for row in rows)), justify="right")
    table.add_column(
        "bytes", footer=format_bytes(sum(row.bytes for row in rows)), justify="right", no_wrap=True
    )
    table.add_column("cause")
    table.add_column("at")
    for row in rows:
        table.add_row(
            row.phase,
            row.op,
            row.by,
            str(row.count),
            format_bytes(row.bytes),
            Text(row.cause),
            Text(row.site, style="dim"),
        )
    if not rows:
        table.add_row("", "none", "", "0", "0 B", Text("one rank sends nothing"), "")
    return table


def timings_line(timings: Mapping[str, float]) -> str:
    """Where the compile time went: `capture 1.2 s, passes 0.3 s, lowering 4.0 s`; passes are summed."""
    stages = {name: timings[name] for name in ("capture", "export", "joint") if name in timings}
    after = {name: timings[name] for name in ("lowering", "inductor") if name in timings}
    single = sum(seconds for name, seconds in timings.items() if name not in {*stages, *after, "passes"})
    stages |= {"passes": timings.get("passes", single), **after}
    return ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in stages.items())


def format_bytes(count: int) -> str:
    """Bytes with the largest binary unit that keeps a whole number before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that reads best."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
