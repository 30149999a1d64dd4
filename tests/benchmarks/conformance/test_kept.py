"""Results of sweeps as tables: what a row keeps, and that files are read as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.conformance import kept

MEASURED = {
    "errors": {"(8,)": 0.0, "(5, 2)": 6.03e-16}, "nodes": 478, "narrow": True, "collectives": 31,
    "gathers": 1, "growing": ["aten.mm"], "fallbacks": ["aten.det"], "static": True, "seconds": 6.4,
}  # fmt: skip
REFUSED = {"failed": "refused", "why": "/env/site-packages/library/net.py:3: a branch\n on a value"}


def test_a_row_keeps_the_worst_error_and_the_counts_of_training() -> None:
    row = kept.updated({}, {"eval": MEASURED | {"nodes": 300}, "train": MEASURED})
    counts = {"nodes": "478", "sums": "30", "gathers": "1", "fallbacks": "1"}
    assert row == {"train": "6e-16 f32", "eval": "6e-16 f32", **counts, "static": "train eval"}


def test_a_mode_that_is_measured_again_replaces_its_own_results_only() -> None:
    row = kept.updated({"model": "Net"}, {"train": MEASURED, "eval": REFUSED, "no_grad": REFUSED})
    why = "library/net.py:3: a branch on a value"
    assert (row["eval"], kept.reasons(row)) == ("refused", {"eval": why, "no_grad": why})
    again = kept.updated(row, {"eval": MEASURED | {"narrow": False, "nodes": 1}})
    states = {"model": "Net", "train": "6e-16 f32", "eval": "6e-16", "no_grad": "refused", "nodes": "478"}
    assert {name: again[name] for name in states} == states
    assert kept.reasons(again) == {"no_grad": why}


def test_tables_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    rows = {"a": kept.updated({}, {"train": MEASURED}), "b, c": kept.updated({}, {"train": REFUSED}), "d": {}}
    assert not kept.is_kept("zoo")
    kept.write("zoo", rows)
    assert kept.read("zoo") == rows
    assert "model" not in (tmp_path / "zoo.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("file", sorted(kept.FOLDER.glob("*.csv")), ids=lambda file: file.stem)
def test_kept_tables_change_by_rows(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over one model leaves all other lines of a table as they are."""
    rows = kept.read(file.stem)
    assert len(rows) > 20
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    kept.write(file.stem, rows)
    assert (tmp_path / file.name).read_text() == file.read_text()
