"""A share of a library's families on two real ranks; it goes round: never measured first, then the oldest."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

from benchmarks.conformance import kept
from benchmarks.conformance.libraries.entries import families
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.shared_work import know_what_models_need, shared_error

RESULTS = kept.FOLDER / "libraries_on_ranks.json"
"""Rows by library and family: as in `zoo_public.json`, and `on`, the day."""


def rows(library: str) -> dict[str, dict[str, Any]]:
    """What is known of the library's families on ranks."""
    return json.loads(RESULTS.read_text()).get(library, {}) if RESULTS.exists() else {}


def share(library: str, count: int) -> list[str]:
    """So many families whose turn it is; small programs first among those that were never measured.

    Those that eager does not run are none, nor those whose model is the catalogue's.
    """
    measured = rows(library)
    able = {name: row for name, row in kept.read(library).items() if _has_turns(row)}
    nodes = {name: int(row.get("nodes", 1_000_000)) for name, row in able.items()}
    iterations = sorted(able, key=lambda name: (measured.get(name, {}).get("on", ""), nodes[name]))
    return iterations[:count]


def _has_turns(row: kept.Row) -> bool:
    catalogued = re.search(r"\((\w+)\)$", row.get("model", ""))
    return row["train"] != "not run by eager" and not (catalogued and catalogued[1] in CATALOGUE)


def know_library(library: str) -> None:
    """Where ranks are forked from: what its models import, and what every model needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families(library)
    know_what_models_need()


def family_error(library: str, name: str, folder: str, *, any_size: bool, wide: int) -> float | None:
    """`shared_error` of the family's smallest model that eager runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = families(library)[name]().entry
    return shared_error(entry, folder, any_size=any_size, wide=wide)
