"""Schedules as text and picture, both of the very object that runs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from expecttest import assert_expected_inline

from fxdp.pipeline.schedule.catalogue import _SCHEDULES, make
from fxdp.pipeline.schedule.timeline import Costs
from fxdp.pipeline.schedule.transfers import Edge
from fxdp.reports.schedule_svg import schedule_svg
from fxdp.reports.schedule_text import schedule_text, timetable

_SVG = "{http://www.w3.org/2000/svg}"


def test_text() -> None:
    assert_expected_inline(
        schedule_text(make("1f1b", 4, 2, 2)),
        """\
rank 0: 0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1
rank 1: 1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1""",
    )


def test_time_axis_as_text() -> None:
    assert_expected_inline(
        timetable(make("1f1b", 2, 2, 11).forward_only()),
        """\
rank 0: F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10
rank 1: .   F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10""",
    )


def test_what_does_not_fit_into_the_columns_goes_on_below() -> None:
    assert_expected_inline(
        timetable(make("gpipe", 2, 2, 3), columns=24),
        """\
rank 0: F0 F1 F2 .  .
rank 1: .  F0 F1 F2 B0

rank 0: .  B0 B0 B1 B1
rank 1: B0 B1 B1 B2 B2

rank 0: B2 B2
rank 1:""",
    )
    lines = timetable(make("1f1b", 11, 11, 40), columns=80).splitlines()
    assert {len(line.partition(":")[0]) for line in lines if line} == {len("rank 10")}
    assert max(map(len, lines)) <= 80


def boxes(picture: str) -> dict[str, ElementTree.Element]:
    """The rectangle of each action, by its word."""
    groups = ElementTree.fromstring(picture).iter(f"{_SVG}g")
    found = {}
    for group in groups:
        title, rectangle = group.find(f"{_SVG}title"), group.find(f"{_SVG}rect")
        assert title is not None
        assert title.text is not None
        assert rectangle is not None
        found[title.text.split(":")[0]] = rectangle
    return found


@pytest.mark.parametrize("name", _SCHEDULES)
def test_each_action_is_drawn_where_and_as_long_as_it_runs(name: str) -> None:
    schedule = make(name, 8, 4, 16)
    costs = Costs((1.0, 2.0) * 4, (1.0,) * 8, (2.0,) * 8)
    line = schedule.timeline(costs)
    drawn = boxes(schedule_svg(schedule, costs))
    assert len(drawn) == len(line.intervals)
    scale = float(drawn["0F0"].attrib["width"]) / (line.intervals[0].finish - line.intervals[0].start)
    rows = {float(drawn[str(spec.action)].attrib["y"]): spec.rank for spec in line.intervals}
    assert sorted(rows) == [y for y, _ in sorted(rows.items(), key=lambda item: item[1])]
    for spec in line.intervals:
        box = drawn[str(spec.action)].attrib
        assert float(box["x"]) - float(drawn["0F0"].attrib["x"]) == pytest.approx(spec.start * scale, abs=0.2)
        assert float(box["width"]) == pytest.approx((spec.finish - spec.start) * scale, abs=0.2)
        assert rows[float(box["y"])] == spec.rank


def test_the_title_names_the_bubble_and_micro_batches_are_written() -> None:
    root = ElementTree.fromstring(schedule_svg(make("1f1b", 8, 8, 16)))
    texts = [element.text for element in root.iter(f"{_SVG}text")]
    assert texts[0] == "1f1b: 8 stages on 8 ranks, 16 micro-batches, bubble 30.4 %"  # 7 / 23
    assert texts.count("15") == 16
    assert float(root.attrib["width"]) < 2000
    assert (
        min(float(box.attrib["width"]) for box in boxes(ElementTree.tostring(root, "unicode")).values()) >= 20
    )


def test_transfers_are_lines_between_ranks() -> None:
    edges = [
        Edge("skip", 0, 3),
        Edge("grad", 3, 0, backward=True),
        Edge("within", 0, 2),
        Edge("w", 0, 1, once=True),
    ]
    picture = schedule_svg(make("zero-bubble", 4, 2, 3), edges=edges)
    names = [path.findtext(f"{_SVG}title") for path in ElementTree.fromstring(picture).iter(f"{_SVG}path")]
    assert names == [f"{name} mb{m}" for name in ("skip", "grad") for m in range(3)]
    assert not list(ElementTree.fromstring(schedule_svg(make("gpipe", 2, 2, 2))).iter(f"{_SVG}path"))


def test_names_are_escaped_and_nothing_is_loaded() -> None:
    schedule = make("gpipe", 2, 2, 2)
    odd = type(schedule)("<a & b>.csv", 2, 2, schedule.placement, schedule.ranks)
    picture = schedule_svg(odd)
    assert ElementTree.fromstring(picture).findtext(f"{_SVG}text", "").startswith("<a & b>.csv: 2 stages")
    assert not any(word in picture for word in ("<script", "href", "url(", "@import"))
