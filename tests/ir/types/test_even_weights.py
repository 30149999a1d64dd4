"""Orders and cuts by weight."""

from __future__ import annotations

import random

import pytest

from fxdp.ir.types.even_weights import even_parts, evenly_cut_order


def _heaviest(weights: list[float], parts: int) -> float:
    """The heaviest part's weight, as a multiple of the mean."""
    begin, found = 0, []
    for size in even_parts(weights, parts):
        found.append(sum(weights[begin : begin + size]))
        begin += size
    assert begin == len(weights)
    return max(found) * parts / sum(weights)


@pytest.mark.parametrize("samples", [48, 256])
def test_one_order_is_even_within_five_percent_for_many_numbers_of_parts(samples: int) -> None:
    drawn = random.Random(samples)
    for _ in range(5):
        weights = [drawn.lognormvariate(0, 0.7) for _ in range(samples)]
        order = evenly_cut_order(weights)
        assert sorted(order) == list(range(samples))
        ordered = [weights[i] for i in order]
        for parts in (2, 3, 4, 6, *((5, 7, 8, 12, 16) if samples == 256 else ())):
            assert _heaviest(ordered, parts) <= 1.05, parts
        assert _heaviest(weights, 4) > _heaviest(ordered, 4)


@pytest.mark.parametrize(("parts", "least"), [(2, 49), (3, 42), (4, 49), (6, 42), (7, 33), (8, 48)])
def test_four_samples_a_rank_are_even_as_far_as_the_heaviest_one_lets_them(parts: int, least: int) -> None:
    drawn, within = random.Random(0), 0
    for _ in range(50):
        weights = [drawn.lognormvariate(0, 0.7) for _ in range(4 * parts)]
        bound = max(1.0, max(weights) * parts / sum(weights))
        ordered = [weights[i] for i in evenly_cut_order(weights)]
        within += _heaviest(ordered, parts) <= 1.05 * bound
    assert within >= least


def test_the_picture_of_the_docstring() -> None:
    weights = [9, 1, 1, 1, 4, 4, 4, 8]
    order = evenly_cut_order(weights)
    assert [weights[i] for i in order] == [9, 1, 1, 1, 4, 8, 4, 4]
    assert even_parts([weights[i] for i in order], 2) == [5, 3]
    assert even_parts([weights[i] for i in order], 4) == [1, 4, 1, 2]


@pytest.mark.parametrize(
    ("weights", "parts", "block", "expected"),
    [
        ([], 3, 1, [0, 0, 0]),
        ([5], 3, 1, [0, 1, 0]),
        ([0, 0, 0, 0], 2, 1, [2, 2]),
        ([1, 0, 0], 2, 1, [0, 3]),
        ([1, 1, 1, 1, 1, 1, 9], 2, 2, [6, 1]),
        ([1, 9, 1, 1], 2, 3, [3, 1]),
    ],
)
def test_cuts(weights: list[float], parts: int, block: int, expected: list[int]) -> None:
    assert even_parts(weights, parts, block) == expected
