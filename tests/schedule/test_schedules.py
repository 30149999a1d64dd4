"""Every schedule against its picture and its closed form."""

from __future__ import annotations

import pytest

from fxdp.errors import ScheduleError
from fxdp.schedule import Costs, make

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 16)]


def rows(name: str, stages: int, ranks: int, microbatches: int) -> list[str]:
    return [" ".join(map(str, row)) for row in make(name, stages, ranks, microbatches).ranks]


def test_gpipe() -> None:
    assert rows("gpipe", 3, 3, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"]


def test_one_f_one_b() -> None:
    assert rows("1f1b", 3, 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [(1.0, 0.5, 0.5), (1.0, 1.0, 1.0), (3.0, 1.0, 0.5)])
def test_bubble_of_one_stage_per_rank(name: str, costs: tuple[float, float, float]) -> None:
    for p, m in SIZES:
        timeline = make(name, p, p, m).timeline(Costs.uniform(p, *costs))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_one_f_one_b_holds_few_microbatches() -> None:
    for p, m in SIZES:
        assert make("1f1b", p, p, m).in_flight() == tuple(min(m, p - stage) for stage in range(p))
        assert make("gpipe", p, p, m).in_flight() == (m,) * p


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ScheduleError, match="no schedule `1F1b`: did you mean `1f1b`"):
        make("1F1b", 2, 2, 2)
    with pytest.raises(ScheduleError, match="2 stages cannot be laid out over 3 ranks"):
        make("1f1b", 2, 3, 2)
    with pytest.raises(ScheduleError, match="0 micro-batches"):
        make("gpipe", 2, 2, 0)
