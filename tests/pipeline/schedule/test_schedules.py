"""Every schedule against its picture, its closed form and the tables of others."""

from __future__ import annotations

import importlib

import pytest

from fxdp.errors import ScheduleError
from fxdp.pipeline.schedule.action import Action, backward, forward
from fxdp.pipeline.schedule.catalogue import _SCHEDULES, make
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs
from fxdp.reports.schedule_text import timetable

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 16)]
EQUAL = (1.0, 0.5, 0.5)
"""A backward that takes as long as a forward."""


def span(schedule: Schedule, costs: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> float:
    return schedule.timeline(Costs.uniform(schedule.stages, *costs)).span


@pytest.mark.parametrize(
    ("name", "module", "ranks", "costs"),
    [
        ("gpipe", "gpipe", 4, None),
        ("1f1b", "one_f_one_b", 4, None),
        ("interleaved", "interleaved", 2, Costs.uniform(4, *EQUAL)),
        ("zero-bubble", "zero_bubble", 4, None),
    ],
)
def test_the_picture_in_the_docstring(name: str, module: str, ranks: int, costs: Costs | None) -> None:
    drawn = timetable(make(name, 4, ranks, 4), costs)
    text = importlib.import_module(f"fxdp.pipeline.schedule.{module}").__doc__ or ""
    picture = [line.strip() for line in text.splitlines() if line.strip().startswith("rank ")]
    assert picture == drawn.splitlines()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [EQUAL, (1.0, 1.0, 1.0), (3.0, 1.0, 0.5)])
def test_bubble_of_one_stage_per_rank(name: str, costs: tuple[float, float, float]) -> None:
    for p, m in SIZES:
        timeline = make(name, p, p, m).timeline(Costs.uniform(p, *costs))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("costs", [EQUAL, (1.0, 1.0, 1.0)])
def test_bubble_of_interleaved(costs: tuple[float, float, float]) -> None:
    for p in range(1, 6):
        for v in range(1, 4):
            for m in (p, p + 1, 2 * p, 2 * p + 1, 13):
                timeline = make("interleaved", p * v, p, m).timeline(Costs.uniform(p * v, *costs))
                assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


def test_bubble_of_zero_bubble() -> None:
    for p in range(1, 9):
        for m in (p, p + 1, 2 * p, 16):
            assert make("zero-bubble", p, p, m).timeline().bubble == pytest.approx((p - 1) / (3 * m + p - 1))


def test_no_schedule_is_slower_than_what_it_improves() -> None:
    for stages in range(2, 8):
        for ranks in range(1, stages + 1):
            for m in (1, 3, 4, 7, 12):
                names = ("gpipe", "1f1b", "interleaved", "zero-bubble")
                gpipe, one, interleaved, zero = (span(make(n, stages, ranks, m)) for n in names)
                assert interleaved <= min(one, gpipe)
                assert zero < one or ranks == 1


def test_one_f_one_b_is_pipedreams() -> None:
    """Warm up with p - 1 - rank forwards, then one forward, one backward, then the rest."""
    for p, m in SIZES:
        for rank, row in enumerate(make("1f1b", p, p, m).ranks):
            warm = min(m, p - 1 - rank)
            steady = [a for i in range(m - warm) for a in (forward(rank, warm + i), backward(rank, i))]
            rest = [backward(rank, i) for i in range(m - warm, m)]
            assert list(row) == [forward(rank, i) for i in range(warm)] + steady + rest


def test_interleaved_takes_stages_in_megatrons_order() -> None:
    for p, v, m in [(2, 2, 4), (2, 3, 8), (3, 2, 9), (4, 2, 8), (4, 4, 4)]:
        for rank, row in enumerate(make("interleaved", p * v, p, m).ranks):
            rounds = [(c * p + rank, g * p + i) for g in range(m // p) for c in range(v) for i in range(p)]
            assert [a for a in row if a.kind == "F"] == [forward(*where) for where in rounds]
            warm = min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1)
            assert all(a.kind == "F" for a in row[:warm])
            if warm < v * m:
                assert row[warm] == backward(rank + (v - 1) * p, 0)


def test_what_stages_hold() -> None:
    for p, m in SIZES:
        assert make("1f1b", p, p, m).in_flight() == tuple(min(m, p - stage) for stage in range(p))
        assert make("gpipe", p, p, m).in_flight() == (m,) * p
        assert max(make("zero-bubble", p, p, m).in_flight()) <= min(m, p)
    assert make("1f1b", 6, 2, 8).in_flight() == (6, 5, 4, 3, 2, 1)
    assert sum(make("interleaved", 8, 4, 16).in_flight()[::4]) < 2 * 16


def test_evaluation_runs_forwards_only() -> None:
    for name in _SCHEDULES:
        evaluation = make(name, 6, 3, 4).forward_only()
        assert not evaluation.trains
        assert {a for row in evaluation.ranks for a in row} == {
            forward(s, m) for s in range(6) for m in range(4)
        }
        assert len(evaluation.order()) == 24


def test_the_order_agrees_with_every_rank_and_the_data() -> None:
    for name in _SCHEDULES:
        schedule = make(name, 5, 3, 4)
        for costs in (
            None,
            Costs((0.0,) * 5, (0.0,) * 5, (0.0,) * 5),
            Costs((9.0, 1, 0, 3, 2), (1.0,) * 5, (0.0,) * 5),
        ):
            order = schedule.order(costs)
            for rank, row in enumerate(schedule.ranks):
                assert tuple(action for r, action in order if r == rank) == row
            at = {action: i for i, (_, action) in enumerate(order)}
            for action, i in at.items():
                assert all(at[needed] < i for needed in _data(action, at))


def _data(action: Action, at: dict[Action, int]) -> list[Action]:
    stage, mb = action.stage, action.microbatch
    if action.kind == "F":
        return [forward(stage - 1, mb)] if stage else []
    return [
        forward(stage, mb),
        *(a for a in at if a.stage == stage + 1 and a.microbatch == mb and a.gives_gradient),
    ]


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ScheduleError, match="no schedule `1F1b`: did you mean `1f1b`"):
        make("1F1b", 2, 2, 2)
    with pytest.raises(
        ScheduleError, match=r"there are gpipe, interleaved, 1f1b, zero-bubble, or a file \*.csv"
    ):
        make("?", 2, 2, 2)
    for name in _SCHEDULES:
        with pytest.raises(ScheduleError, match="2 stages cannot be laid out over 3 ranks"):
            make(name, 2, 3, 2)
        with pytest.raises(ScheduleError, match="0 micro-batches"):
            make(name, 2, 2, 0)
