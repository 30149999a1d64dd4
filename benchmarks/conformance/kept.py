"""Results of sweeps as tables that git keeps: a line a model, of what pages and later sweeps read.

All that was measured, each split and each op whose bytes grow, is appended to `out/conformance.jsonl`.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from tests.zoo.measure import MODES

FOLDER = Path(__file__).with_name("results")
FAILURES = ("refused", "wrong", "error", "not measured", "not run by eager")
_COLUMNS = ("name", "model", *MODES, "nodes", "sums", "gathers", "fallbacks", "static", "why")
_MEASURED = Path(__file__).resolve().parents[2] / "out" / "conformance.jsonl"

Result = dict[str, Any]
"""One model in one mode: the fields of `tests.zoo.measure.Measured`, or `failed` and `why`."""
Row = dict[str, str]
"""A model: the state of each mode, counts of its program, and a line of `why` for each mode that failed."""


def read(table: str) -> dict[str, Row]:
    """The rows of `results/TABLE.csv` by name; none where nothing was measured."""
    if not is_kept(table):
        return {}
    with _file(table).open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {line.pop("name"): {column: text for column, text in line.items() if text} for line in lines}


def write(table: str, rows: dict[str, Row]) -> None:
    """Write all rows, in their order."""
    used = [column for column in _COLUMNS if column == "name" or any(column in row for row in rows.values())]
    with _file(table).open("w", newline="") as file:
        writer = csv.DictWriter(file, used, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"name": name, **row} for name, row in rows.items())


def is_kept(table: str) -> bool:
    """Whether there are results."""
    return _file(table).exists()


def meta(table: str, name: str, results: dict[str, Result]) -> None:
    """Append to the file outside git all that was measured of a model, by mode."""
    _MEASURED.parent.mkdir(exist_ok=True)
    with _MEASURED.open("a") as file:
        file.write(json.dumps({"table": table, "name": name, **results}) + "\n")


def updated(row: Row, results: dict[str, Result]) -> Row:
    """The row with results of some modes; counts are those of training, where it was measured."""
    whys, static = reasons(row), set(row.get("static", "").split())
    counts = {key: row[key] for key in ("nodes", "sums", "gathers", "fallbacks") if key in row}
    for mode, result in results.items():
        row = row | {mode: state(result)}
        whys.pop(mode, None)
        static.discard(mode)
        if "failed" in result:
            whys[mode] = shortened(result["why"])
            continue
        if result["static"]:
            static.add(mode)
        if mode == "train" or not counts:
            counts = _counts(result)
    lists = {
        "static": " ".join(mode for mode in MODES if mode in static),
        "why": "\n".join(f"{mode}: {whys[mode]}" for mode in MODES if mode in whys),
    }
    kept = {key: row[key] for key in ("model", *MODES) if key in row}
    return {**kept, **counts, **{key: text for key, text in lists.items() if text}}


def _counts(result: Result) -> Row:
    counts = {"nodes": result["nodes"], "sums": result["collectives"] - result["gathers"]}
    counts |= {"gathers": result["gathers"], "fallbacks": len(result["fallbacks"])}
    return {key: str(count) for key, count in counts.items()}


def reasons(row: Row) -> dict[str, str]:
    """Why modes failed, by mode."""
    lines = (line.partition(": ") for line in row.get("why", "").splitlines())
    return {mode: why for mode, _, why in lines}


def state(result: Result) -> str:
    """`6e-16`, `6e-16 f32`, or in a word what went wrong."""
    if "failed" in result:
        return str(result["failed"])
    worst = max(result["errors"].values())
    return f"{worst:.0e} f32" if result["narrow"] else f"{worst:.0e}"


def shortened(why: str) -> str:
    """One line, with paths from the library's folder on."""
    text = re.sub(r"\S*/(?:site|dist)-packages/", "", " ".join(why.split()))
    return text if len(text) <= 420 else f"{text[:417]}..."


def _file(table: str) -> Path:
    return FOLDER / f"{table}.csv"
