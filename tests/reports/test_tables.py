"""Tables as a reader sees them."""

from __future__ import annotations

from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from fxdp.reports.rows import CommRow, format_bytes, format_seconds
from fxdp.reports.sheet import Sheet, sheets_html
from fxdp.reports.tables import communication_table, timings_line

Row = partial(CommRow, by="gloo")


def _text(*rows: CommRow) -> list[str]:
    return _printed(communication_table(rows))


def _printed(table: Sheet, width: int = 100) -> list[str]:
    console = Console(width=width, file=StringIO())
    with console.capture() as shown:
        console.print(table)
    return [line.rstrip() for line in shown.get().splitlines()]


def test_each_collective_has_its_cause_and_the_last_line_is_the_sum() -> None:
    rows = (
        Row("all_reduce", 2048, 2, "gradient of [w]", "model.py:7", "backward"),
        Row("all_reduce", 4, 1, "loss", "model.py:9", "forward"),
    )
    lines = _text(*rows)
    assert "│ backward │ all_reduce │ gloo │     2 │ 2.0 KiB │ gradient of [w] │ model.py:7 │" in lines
    assert "│ total    │            │      │     3 │ 2.0 KiB │                 │            │" in lines
    assert ">total</td>" in sheets_html([communication_table(rows)])


def test_words_and_numbers_stay_whole_in_a_narrow_terminal() -> None:
    row = Row("reduce_scatter", 2048, 2, "gradients of some parameters", "model.py:7", "backward")
    shown = "\n".join(_printed(communication_table([row]), width=70))
    assert "reduce_scatter" in shown
    assert "2.0 KiB" in shown
    assert "gradients of some parameters" not in shown, "what is long goes on below"


def test_one_rank_sends_nothing() -> None:
    assert any("one rank sends nothing" in line for line in _text())


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3_300_000, "3.1 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_seconds() -> None:
    assert format_seconds(0.0123) == "12.3 ms"


def test_passes_are_summed() -> None:
    timings = {"capture": 1.24, "canonicalize": 0.2, "localize-shapes": 0.3, "lowering": 4.0}
    assert timings_line(timings) == "capture 1.2 s, passes 500.0 ms, lowering 4.0 s"
    assert timings_line({**timings, "passes": 0.5}) == timings_line(timings)
