"""The results of a sweep over a library's own list, as a section of `ZOO.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from library_ranks import rows as rows_on_ranks
from library_sweep import results
from zoo_table import public_state, public_summary, shortened, state

Row = dict[str, Any]

_SUMMARY = """## Whole libraries

The smallest model of every family that a library itself lists, in training, with a loss, on three ranks with
5, 0 and 1 samples (`--library all --missing` goes on; families come in an order that has nothing to do with
their names). Families that eager does not run here are no rows.
A family of transformers is the catalogue's model if it has one, else the family's own configuration with
small sizes, without what draws in Python (LayerDrop, SpecAugment), experts as `batched_mm`.
`two ranks`: a share of the families, which goes round, as in the tables above: on two real ranks, through
Inductor; what it cannot compile has failed (`zoo_public.py --library timm --share 8`). {public}
A model of timm has two blocks in a stage where its class has a setting for them, which its row names; one of
diffusers is as small as the library's own tests make it, or, where these have none, as `diffusers_*.py` here.

| library | families | measured | eager runs | exact | refused | wrong | raw errors | too slow | two ranks |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""
_KINDS = ("refused", "wrong", "error", "not measured")
_HEAD = """## {library} {version}

**{exact} of {run} families that eager runs are captured and exact**; measured are {measured} of the {listed}
families{other}.

| family | model | train | two ranks | sums | gathers | run whole on each rank |
|---|---|---|---|---|---|---|
{rows}
"""


def library_summary(libraries: Sequence[str]) -> str:
    """A row for each library."""
    every = {library: rows_on_ranks(library) for library in libraries}
    on_ranks = {f"{library} {name}": row for library, rows in every.items() for name, row in rows.items()}
    lines = "\n".join(map(_counts, filter(_is_measured, libraries)))
    return _SUMMARY.format(rows=lines, public=public_summary(on_ranks))


def _is_measured(library: str) -> bool:
    return results(library).exists()


def _counts(library: str) -> str:
    kept = json.loads(results(library).read_text())
    failed = [row.get("failed", "") for row in kept["families"].values()]
    run = len(failed) - failed.count("not run by eager")
    on_ranks = len(rows_on_ranks(library))
    counts = [kept["listed"], len(failed), run, failed.count(""), *map(failed.count, _KINDS), on_ranks]
    return f"| {library} {kept['version']} | {' | '.join(map(str, counts))} |"


def library_page(library: str) -> str:
    """A section, empty where the library was not measured."""
    if not _is_measured(library):
        return ""
    kept = json.loads(results(library).read_text())
    rows: dict[str, Row] = kept["families"]
    run = {name: row for name, row in rows.items() if row.get("failed") != "not run by eager"}
    exact = {name: row for name, row in run.items() if "failed" not in row}
    on_ranks = rows_on_ranks(library)
    left = sorted(rows.keys() - run.keys())
    other = f". Eager does not run here, or no small model is known of: {', '.join(left)}" if left else ""
    head = _HEAD.format(
        library=library, version=kept["version"], exact=len(exact), run=len(run), other=other,
        measured=len(rows), listed=kept["listed"],
        rows="\n".join(_line(name, row, on_ranks.get(name, {})) for name, row in exact.items()),
    )  # fmt: skip
    return head + _reasons({name: row for name, row in run.items() if "failed" in row})


def _line(name: str, row: Row, on_ranks: Row) -> str:
    counts = (row["collectives"] - row["gathers"], row["gathers"], len(row["fallbacks"]) or "")
    return f"| {' | '.join([name, row['model'], state(row), public_state(on_ranks), *map(str, counts)])} |"


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
