"""Rows as tables for a terminal: of a plan, and of the op rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fxdp.reports.rows import CommRow, CoverageRow, format_bytes, format_seconds
from fxdp.rules.op_table import RuleRow, counts


def communication_table(rows: Sequence[CommRow]) -> Table:
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


def coverage_table(rows: Sequence[CoverageRow]) -> Table:
    """What does not split over the ranks, with the reason and the remedy."""
    table = Table(title="what does not split over the ranks", title_justify="left")
    for name in ("op", "bytes", "where, why, and what to do"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for row in rows:
        times = f" {row.count} times" if row.count > 1 else ""
        op = Text(row.op).append(f"\n{row.what}{times}\n{row.phase}", "dim")
        advice = Text(f"{row.site}\n", "cyan").append(f"{row.cause}\n{row.remedy}", "default")
        table.add_row(op, format_bytes(row.bytes), advice)
    return table


def rules_table(rows: tuple[RuleRow, ...]) -> Table:
    """One line per op; the last one counts the kinds."""
    totals = ", ".join(f"{n} {kind}" for kind, n in counts(rows).items())
    table = Table(title="op rules", title_justify="left", show_footer=True)
    table.add_column("op", footer=f"{len(rows)} ops", no_wrap=True)
    table.add_column("family")
    table.add_column("kind", footer=totals)
    for row in rows:
        table.add_row(row.op, row.family, row.kind)
    return table


def timings_line(timings: Mapping[str, float]) -> str:
    """Where the compile time went: `capture 1.2 s, passes 0.3 s, lowering 4.0 s`; passes are summed."""
    stages = {name: timings[name] for name in ("capture", "export", "joint") if name in timings}
    after = {name: timings[name] for name in ("lowering", "inductor") if name in timings}
    single = sum(seconds for name, seconds in timings.items() if name not in {*stages, *after, "passes"})
    stages |= {"passes": timings.get("passes", single), **after}
    return ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in stages.items())
