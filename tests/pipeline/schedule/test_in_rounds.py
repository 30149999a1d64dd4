"""Rounds: micro-batches that wait for one another, as a schedule for plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import fxdp
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.schedule.catalogue import make
from fxdp.pipeline.schedule.in_rounds import in_rounds
from fxdp.reports.schedule_text import schedule_lines, timetable

F, B = (Kind.FORWARD,), (Kind.BACKWARD,)
ROUNDS = ([(0, F)], [(0, F), (1, (*F, *B))], [(0, B)], [(0, B)])


def test_a_round_begins_when_all_have_ended_the_one_before() -> None:
    schedule = in_rounds(ROUNDS, (0, 1), 2)
    assert_expected_inline(
        timetable(schedule),
        """\
rank 0: F0r0 F1r0 F0r1 F1r1 .    .    .    .    .    B0r2 B0r2 B1r2 B1r2 B0r3 B0r3 B1r3 B1r3
rank 1: .    .    .    F0r1 B0r1 B0r1 F1r1 B1r1 B1r1""",
    )
    assert_expected_inline(
        "\n".join(schedule_lines(schedule, 60)),
        """\
round 0: stage 0 forward
round 1: stage 0 forward, stage 1 forward and backward
rounds 2 to 3: stage 0 backward""",
    )
    assert schedule.trains
    assert not schedule.forward_only().trains
    assert csv.parse(csv.write(schedule), "rounds") == schedule


def test_a_file_has_no_rounds(tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text(csv.write(in_rounds(ROUNDS, (0, 1), 2)))
    with pytest.raises(fxdp.ScheduleError, match=r"has rounds, which follow from a model"):
        make(str(path), 2, 2, 2)
