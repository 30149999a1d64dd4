"""Sections of the doctor's text."""

from __future__ import annotations

from fxdp.cli.doctor.section import Row, Section


def test_lines_are_at_most_80_columns_wide() -> None:
    rows = Row("fxdp", "word " * 40), Row("a_name_of_many_letters", "x"), Row("no", "")
    section = Section("caches", rows)
    lines = section.lines()
    assert lines[0] == "caches"
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  fxdp              word")
    assert all(line.startswith(" " * 20) for line in lines[2:4])
    assert lines[-2:] == ["  a_name_of_many_letters x", "  no"]


def test_a_row_that_failed_says_so() -> None:
    section = Section("checks", (Row("fine", "as one device"), Row("not", "ValueError: no", ok=False)))
    assert not section.ok
    fine, failed = section.lines()[1:]
    assert fine == "  fine              as one device"
    assert failed == "  not               FAILED: ValueError: no"
