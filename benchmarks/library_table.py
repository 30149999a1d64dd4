"""The results of a sweep over a library's own list, as a section of `ZOO.md`."""

from __future__ import annotations

import json
import re
from typing import Any

from library_sweep import results
from zoo_table import shortened, state

Row = dict[str, Any]

_HEAD = """## {library} {version}

The smallest model of each family that {library} itself lists, in training, with its loss, on three ranks
with 5, 0 and 1 samples: **{exact} of {run} families that eager runs are captured and exact**{other}.
Measured are {measured} of the {listed} families (`--library {library} --missing` goes on).

| family | model | train | sums | gathers | run whole on each rank |
|---|---|---|---|---|---|
{rows}
"""


def library_page(library: str) -> str:
    """A section, empty where the library was not measured."""
    if not results(library).exists():
        return ""
    kept = json.loads(results(library).read_text())
    rows: dict[str, Row] = kept["families"]
    run = {name: row for name, row in rows.items() if row.get("failed") != "not run by eager"}
    exact = {name: row for name, row in run.items() if "failed" not in row}
    left = sorted(rows.keys() - run.keys())
    other = f"; eager does not run {', '.join(left)}" if left else ""
    head = _HEAD.format(
        library=library, version=kept["version"], exact=len(exact), run=len(run), other=other,
        measured=len(rows), listed=kept["listed"],
        rows="\n".join(_line(name, row) for name, row in exact.items()),
    )  # fmt: skip
    return head + _reasons({name: row for name, row in run.items() if "failed" in row})


def _line(name: str, row: Row) -> str:
    counts = (row["collectives"] - row["gathers"], row["gathers"], len(row["fallbacks"]) or "")
    return f"| {' | '.join([name, row['model'], state(row), *map(str, counts)])} |"


def _reasons(failed: dict[str, Row]) -> str:
    """What failed, the reason that most families share first."""
    by_reason: dict[str, list[str]] = {}
    for name, row in failed.items():
        by_reason.setdefault(f"{row['failed']}: {_reason(row['why'])}", []).append(name)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = [f"- {len(names)} ({', '.join(names)}): {why}" for why, names in ranked]
    return "\n".join(["", "Not captured, or not exact:\n", *lines, ""]) if lines else ""


def _reason(why: str) -> str:
    """A reason without the line of one model, so that others can share it."""
    return re.sub(r"\S*?([\w.]+/[\w.]+\.py):\d+", r"\1", shortened(why))
