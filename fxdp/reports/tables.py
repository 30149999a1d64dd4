"""A table of the communication of a step, and a line about compile time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fxdp.reports.places import short_path
from fxdp.reports.rows import CommRow, format_bytes, format_seconds
from fxdp.reports.sheet import Sheet

_FILE = re.compile(r"^([^`<]+?)(:\d+)")
_COMMUNICATION = "communication of one step"


def communication_table(rows: Sequence[CommRow]) -> Sheet:
    """Return a table of the collectives of one step, each with the cause; the last line is the total."""
    columns = ("=phase", "=op", "=by", "#count", "#bytes", "cause", "at")
    shown = tuple(
        (row.phase, row.op, row.by, str(row.count), format_bytes(row.bytes), row.cause, _near(row.location))
        for row in rows
    )
    count, size = sum(row.count for row in rows), format_bytes(sum(row.bytes for row in rows))
    meta = "" if rows else "one rank sends nothing"
    return Sheet(_COMMUNICATION, columns, shown, meta, ("total", "", "", str(count), size, "", ""))


def _near(location: str) -> str:
    """Shorten the path at the beginning of a location's text."""
    return _FILE.sub(lambda found: short_path(found[1]) + found[2], location, count=1)


def timings_line(timings: Mapping[str, float]) -> str:
    """Return the compile time by stage: `capture 1.2 s, passes 0.3 s, lowering 4.0 s`; passes are summed."""
    stages = {name: timings[name] for name in ("capture", "export", "joint") if name in timings}
    after = {name: timings[name] for name in ("lowering", "inductor") if name in timings}
    single = sum(seconds for name, seconds in timings.items() if name not in {*stages, *after, "passes"})
    stages |= {"passes": timings.get("passes", single), **after}
    return ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in stages.items())
