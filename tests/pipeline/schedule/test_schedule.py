"""What a schedule refuses, and what its time axis says."""

from __future__ import annotations

import re

import pytest

from fxdp.errors import DeadlockError, ScheduleError
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.catalogue import make
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs


def schedule(
    *rows: str, stages: int = 2, microbatches: int = 1, placement: tuple[int, ...] = (0, 1)
) -> Schedule:
    ranks = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    return Schedule("x", stages, microbatches, placement, ranks)


def test_words() -> None:
    assert Action.parse(" 12W3 ") == Action(12, Kind.WEIGHT_GRADIENT, 3)
    assert str(Action(12, Kind.WEIGHT_GRADIENT, 3)) == "12W3"
    for word in ("", "F0", "0X1", "0F", "0SEND_F1", "0F0F0"):
        with pytest.raises(ScheduleError, match="is no action: expected stage"):
            Action.parse(word)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (("0F0 0B0", "1F0"), "1B0 is missing"),
        (("0F0 0B0", "1B0"), "1F0 is missing"),
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 occurs 2 times"),
        (("0F0 0B0 1F0 1B0", ""), "1F0 is on rank 0, but its stage is on rank 1"),
        (("0F0 0B0", "1F0 1B0 1W0"), "1B0 occurs beside 1W0"),
        (("0F0 0B0", "1F0 1I0 1B0 1W0"), "1B0 occurs beside 1I0"),
        (("0F0 0B0", "1F0 1I0"), "1W0 is missing after 1I0"),
        (("0F0 0B0", "1F0 1W0"), "1I0 is missing before 1W0"),
        (("0F0 0B0", "1B0 1F0"), "1B0 comes before 1F0"),
        (("0F0 0B0", "1F0 1W0 1I0"), "1W0 comes before 1I0"),
        (("0F0 0B0", "1F0 1B0 2F0 1F7"), "2F0 of rank 1: there is no such stage or micro-batch"),
        (("0F0 0B0",), "stage 1 is on rank 1, which does not exist"),
    ],
)
def test_faults(rows: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ScheduleError) as error:
        schedule(*rows)
    assert f"  {fault}" in str(error.value).splitlines()


def test_all_faults_at_once() -> None:
    with pytest.raises(ScheduleError) as error:
        schedule("0F0 0F0", "1B0 1F0", microbatches=2)
    assert str(error.value).splitlines() == [
        "schedule x of 2 stages, 2 micro-batches and 2 ranks is not complete:",
        "  0F0 occurs 2 times",
        "  0B0 is missing",
        "  0F1 is missing",
        "  0B1 is missing",
        "  1F1 is missing",
        "  1B1 is missing",
        "  1B0 comes before 1F0",
        "expected each stage on one rank, with one F and then one B (or I, then W) per micro-batch",
    ]


def test_a_circle_of_actions_is_refused_with_the_circle() -> None:
    circle = schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    with pytest.raises(DeadlockError) as error:
        circle.order()
    lines = str(error.value).splitlines()
    assert set(lines[1:3]) == {
        "  rank 0 is at 0B0, which needs 1B0 of rank 1",
        "  rank 1 is at 1F1, which needs 0F1 of rank 0",
    }


def test_a_rank_that_waits_for_itself() -> None:
    with pytest.raises(DeadlockError, match="rank 0 is at 1F0, which needs 0F0 of rank 0"):
        schedule("1F0 0F0 1B0 0B0", placement=(0, 0)).order()


def test_mixed_backwards() -> None:
    """One stage may split its backward where another does not."""
    mixed = schedule("0F0 0B0", "1F0 1I0 1W0")
    assert [str(action) for _, action in mixed.order()] == ["0F0", "1F0", "1I0", "1W0", "0B0"]
    assert mixed.in_flight() == (1, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gradients_first(name: str, stages: int, microbatches: int) -> None:
    """The same order of work; p - 1 ranks less wait for a W than in the 3 (m + p - 1) units of entire Bs."""
    full = make(name, stages, stages, microbatches)
    split = full.gradients_first(range(1, stages))
    assert full.timeline().span == 3 * (microbatches + stages - 1)
    assert split.timeline().span == 3 * microbatches + 2 * (stages - 1)
    assert split.in_flight() == full.in_flight()
    assert split.ranks[0] == full.ranks[0]
    for row, cut in zip(full.ranks[1:], split.ranks[1:], strict=True):
        process_mesh = " ".join(str(action) for action in row)
        assert re.sub(r"(\d+)I(\d+) \1W\2", r"\1B\2", " ".join(map(str, cut))) == process_mesh


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_last_gradient_leaves_before_the_weights_of_two_microbatches(
    name: str, stages: int, microbatches: int
) -> None:
    full = make(name, stages, stages, microbatches)
    split = full.gradients_first(range(1, stages))
    late = full.gradients_first(range(1, stages), holds_more=True)
    assert late.timeline().span == split.timeline().span - (1 if name == "1f1b" else 0)
    assert late.ranks[0] == full.ranks[0]
    for row, before in zip(late.ranks[1:], split.ranks[1:], strict=True):
        assert sorted(row) == sorted(before)
        assert [a.kind for a in row[-3:]] == [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.WEIGHT_GRADIENT]
    assert max(late.in_flight()) == max(full.in_flight())


def test_what_a_user_halves_stays_in_its_order() -> None:
    written = schedule("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1", microbatches=2)
    assert written.gradients_first([1], holds_more=True).ranks == written.ranks
    once = make("1f1b", 2, 2, 1)
    assert once.gradients_first([1], holds_more=True).ranks == once.gradients_first([1]).ranks


def test_time_axis() -> None:
    line = schedule("0F0 0B0", "1F0 1B0").timeline(Costs((1.0, 2.0), (3.0, 1.0), (1.0, 1.0)))
    assert [(str(s.action), s.rank, s.start, s.finish) for s in line.intervals] == [
        ("0F0", 0, 0.0, 1.0),
        ("1F0", 1, 1.0, 3.0),
        ("1B0", 1, 3.0, 5.0),
        ("0B0", 0, 5.0, 9.0),
    ]
    assert line.span == 9.0
    assert line.bubble == pytest.approx(1 - 9 / 18)
