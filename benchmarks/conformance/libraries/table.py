"""The results of a sweep over a library's own list, as a section of `ZOO.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.conformance import kept
from benchmarks.conformance.kept import Row
from benchmarks.conformance.libraries.ranks import rows as rows_on_ranks
from benchmarks.conformance.libraries.sweep import listings
from benchmarks.conformance.zoo_table import Found, counts, public_state, public_summary

_SUMMARY = """## Entire libraries

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

| family | model | train | two ranks | sums | gathers | run replicated on each rank |
|---|---|---|---|---|---|---|
{rows}
"""


def library_summary(libraries: Sequence[str]) -> str:
    """A row for each library."""
    every = {library: rows_on_ranks(library) for library in libraries}
    on_ranks = {f"{library} {name}": row for library, rows in every.items() for name, row in rows.items()}
    lines = "\n".join(map(_counts, filter(kept.is_kept, libraries)))
    return _SUMMARY.format(rows=lines, public=public_summary(on_ranks))


def _counts(library: str) -> str:
    """A line of the summary."""
    listing, states = listings()[library], [row["train"] for row in kept.read(library).values()]
    run = len(states) - states.count("not run by eager")
    exact = sum(state not in kept.FAILURES for state in states)
    failed, on_ranks = map(states.count, _KINDS), len(rows_on_ranks(library))
    numbers = [listing["listed"], len(states), run, exact, *failed, on_ranks]
    return f"| {library} {listing['version']} | {' | '.join(map(str, numbers))} |"


def library_page(library: str) -> str:
    """A section, empty where the library was not measured."""
    if not kept.is_kept(library):
        return ""
    rows, listing = kept.read(library), listings()[library]
    run = {name: row for name, row in rows.items() if row["train"] != "not run by eager"}
    exact = {name: row for name, row in run.items() if row["train"] not in kept.FAILURES}
    on_ranks = rows_on_ranks(library)
    left = sorted(rows.keys() - run.keys())
    other = f". Eager does not run here, or no small model is known of: {', '.join(left)}" if left else ""
    head = _HEAD.format(
        library=library, version=listing["version"], exact=len(exact), run=len(run), other=other,
        measured=len(rows), listed=listing["listed"],
        rows="\n".join(_line(name, row, on_ranks.get(name, {})) for name, row in exact.items()),
    )  # fmt: skip
    return head + _reasons({name: row for name, row in run.items() if name not in exact})


def _line(name: str, row: Row, on_ranks: Found) -> str:
    return f"| {' | '.join([name, row['model'], row['train'], public_state(on_ranks), *counts(row)])} |"


def _reasons(failed: dict[str, Row]) -> str:
    """What failed, the reason that most families share first."""
    by_reason: dict[str, list[str]] = {}
    for name, row in failed.items():
        by_reason.setdefault(f"{row['train']}: {_without_line(kept.reasons(row)['train'])}", []).append(name)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = [f"- {len(names)} ({', '.join(names)}): {why}" for why, names in ranked]
    return "\n".join(["", "Not captured, or not exact:\n", *lines, ""]) if lines else ""


def _without_line(why: str) -> str:
    """A reason without the line of one model, so that others can share it."""
    return re.sub(r"\S*?([\w.]+/[\w.]+\.py):\d+", r"\1", why)
