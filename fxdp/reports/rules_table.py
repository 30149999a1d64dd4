"""The table of op rules for a terminal."""

from __future__ import annotations

from rich.table import Table

from fxdp.rules.op_table import RuleRow, counts


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
