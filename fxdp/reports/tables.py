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


class StageRow(Protocol):
    """What the table reads of a row of `Plan.stages`."""

    @property
    def stage(self) -> int:
        """Its number."""

    @property
    def rank(self) -> int:
        """Its pipeline rank."""

    @property
    def begins(self) -> str:
        """The module of its first op."""

    @property
    def share(self) -> float:
        """Of the cost of all stages."""

    @property
    def parameters(self) -> int:
        """Elements of the parameters that it owns."""

    @property
    def parameter_bytes(self) -> int:
        """Their bytes."""

    @property
    def sent(self) -> int:
        """Bytes that it sends in a step."""


def stage_table(rows: Sequence[StageRow]) -> Table:
    """The stages of a program, each with its rank, cost, parameters and what it sends."""
    table = Table(title="stages", title_justify="left", show_footer=True)
    table.add_column("stage", footer="total", no_wrap=True)
    table.add_column("rank", justify="right")
    table.add_column("cost", justify="right")
    table.add_column("parameters", footer=f"{sum(row.parameters for row in rows):,}", justify="right")
    held, sent = sum(row.parameter_bytes for row in rows), sum(row.sent for row in rows)
    table.add_column("bytes", footer=format_bytes(held), justify="right", no_wrap=True)
    table.add_column("sent per step", footer=format_bytes(sent), justify="right", no_wrap=True)
    table.add_column("begins in")
    for row in rows:
        cells = (f"{100 * row.share:.1f} %", f"{row.parameters:,}", format_bytes(row.parameter_bytes))
        begins = Text(row.begins or "the model itself", style="dim")
        table.add_row(str(row.stage), str(row.rank), *cells, format_bytes(row.sent), begins)
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
