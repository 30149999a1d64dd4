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


def test_long_texts_stand_below_their_row_where_they_do_not_fit_beside_it() -> None:
    code = "`logits = F.linear(self.norm(x), self.tokens.weight)`"
    rows = (
        Row(
            "all_reduce", 8, 1, "2 sums: aten.div.Tensor", f"/home/me/work/net/model.py:12 {code}", "forward"
        ),
        Row("reduce_scatter", 3_300_000, 12, "gradients of some parameters", "model.py:7", "backward"),
    )
    table = communication_table(rows)
    assert "│ phase    │ op             │" in _printed(table, 160)[2].replace("┃", "│")
    assert _printed(table, 80) == [
        "communication of one step",
        "phase     op              by    count    bytes",
        "forward   all_reduce      gloo      1      8 B",
        "  cause  2 sums: aten.div.Tensor",
        "  at     net/model.py:12 `logits = F.linear(self.norm(x), self.tokens.weight)`",
        "backward  reduce_scatter  gloo     12  3.1 MiB",
        "  cause  gradients of some parameters",
        "  at     model.py:7",
        "total                              13  3.1 MiB",
    ]


def test_a_first_word_that_is_too_long_goes_on_in_the_next_line() -> None:
    table = Sheet("ops", ("op", "=kind"), (("a" * 30, "batched"),))
    assert [line for line in _printed(table, 30) if "a" in line] == [
        "│ aaaaaaaaaaaaaaaa │ batched │",
        "│ aaaaaaaaaaaaaa   │         │",
    ]


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
