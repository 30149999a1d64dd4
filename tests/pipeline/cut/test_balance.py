"""Cuts against exhaustive search."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.errors import StageError
from fxdp.pipeline.cut.balance import balance

_COSTS = st.one_of(st.integers(0, 20).map(float), st.floats(0, 100))
_BYTES = st.one_of(st.integers(0, 8).map(float), st.just(math.inf))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], int]:
    """Up to 20 cut points, some of them forbidden."""
    costs = draw(st.lists(_COSTS, min_size=1, max_size=21))
    crossing = draw(st.lists(_BYTES, min_size=len(costs) - 1, max_size=len(costs) - 1))
    allowed = sum(size < math.inf for size in crossing)
    return costs, crossing, draw(st.integers(1, min(allowed + 1, 6)))


def every_cut(crossing: list[float], stages: int) -> list[tuple[int, ...]]:
    allowed = [i + 1 for i, size in enumerate(crossing) if size < math.inf]
    return list(combinations(allowed, stages - 1))


def sent(crossing: list[float], cuts: tuple[int, ...]) -> float:
    return sum(crossing[c - 1] for c in cuts)


def loads(costs: list[float], cuts: tuple[int, ...]) -> tuple[float, ...]:
    """The cost of each stage under these cuts."""
    ends = [0, *cuts, len(costs)]
    return tuple(math.fsum(costs[a:b]) for a, b in pairwise(ends))


@settings(max_examples=120, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.1, 0.5]))
def test_as_exhaustive_search(problem: tuple[list[float], list[float], int], tolerance: float) -> None:
    costs, crossing, stages = problem
    cuts = balance(costs, crossing, stages, tolerance)
    every = {c: max(loads(costs, c)) for c in every_cut(crossing, stages)}
    assert cuts in every
    limit = min(every.values()) * (1 + tolerance) * (1 + 1e-9)
    assert every[cuts] <= limit * (1 + 1e-12) + 1e-12
    surely = [c for c, slowest in every.items() if slowest <= limit * (1 - 1e-12)]
    assert sent(crossing, cuts) <= min((sent(crossing, c) for c in surely), default=math.inf)
    alike = [c for c in surely if sent(crossing, c) == sent(crossing, cuts)]
    assert every[cuts] <= min((every[c] for c in alike), default=math.inf) * (1 + 1e-9) + 1e-12


def test_load_first_bytes_second() -> None:
    costs, crossing = [4.0, 1.0, 1.0, 2.0, 2.0, 2.0], [9.0, 9.0, 1.0, 9.0, 3.0]
    assert balance(costs, crossing, 3) == (1, 4)
    assert balance(costs, crossing, 3, tolerance=0.5) == (3, 5)
    assert loads(costs, (3, 5)) == (6.0, 4.0, 2.0)


def test_twenty_cut_points() -> None:
    """Transformer-like: blocks of uneven cost with narrow places between them."""
    for seed in range(6):
        rng = random.Random(seed)
        costs = [rng.lognormvariate(0, 1) for _ in range(21)]
        crossing = [float(rng.choice([1, 1, 2, 5])) for _ in range(20)]
        for stages in range(2, 6):
            every = {c: max(loads(costs, c)) for c in every_cut(crossing, stages)}
            best = min(every.values())
            cuts = balance(costs, crossing, stages)
            assert every[cuts] <= 1.10 * best * (1 + 1e-9)
            assert sent(crossing, cuts) == min(
                sent(crossing, c) for c, load in every.items() if load <= 1.1 * best
            )
            assert every[balance(costs, crossing, stages, tolerance=0.0)] == pytest.approx(best)


def test_equal_bytes_are_cut_evenly() -> None:
    assert balance([1.0] * 12, [7.0] * 11, 4) == (3, 6, 9)
    assert balance([1.0] * 10, [7.0] * 9, 4, tolerance=1.0) != balance(
        [1.0] * 10, [1.0] + [7.0] * 8, 4, tolerance=1.0
    )


def test_a_hundred_layers_of_many_nodes() -> None:
    """4,000 segments: cuts only between layers, where little crosses."""
    crossing = [1.0 if (i + 1) % 40 == 0 else 100.0 for i in range(3999)]
    cuts = balance([1.0] * 4000, crossing, 8)
    assert all(cut % 40 == 0 for cut in cuts)
    assert max(loads([1.0] * 4000, cuts)) <= 1.1 * 500


@pytest.mark.parametrize(
    ("costs", "crossing", "stages", "message"),
    [
        ([1.0, 1.0], [1.0], 3, "2 regions with 1 cut points cannot make 3 stages: expected 1 to 2"),
        ([1.0] * 3, [math.inf, 1.0], 3, "3 regions with 1 cut points cannot make 3 stages"),
        ([1.0], [], 0, "cannot make 0 stages"),
        ([], [], 1, "cannot make 1 stages"),
    ],
)
def test_bad_input(costs: list[float], crossing: list[float], stages: int, message: str) -> None:
    with pytest.raises(StageError, match=message):
        balance(costs, crossing, stages)
