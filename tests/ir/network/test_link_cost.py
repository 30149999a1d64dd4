from __future__ import annotations

import itertools

import pytest

from fxdp.ir.network.link_cost import IN_MEMORY, LARGEST, LinkCost, bucket_of, few_runs, in_memory

MB = 1 << 20


@pytest.mark.parametrize(
    ("mbit", "latency", "total", "bucket"),
    [
        (100, 125e-6, 10 * MB, MB // 4),  # slow: many, as a part of the wire's time is nobody's
        (1000, 125e-6, 10 * MB, MB),
        (10_000, 125e-6, 10 * MB, 4 * MB),
        (1000, 125e-6, 1000 * MB, 8 * MB),
        (100_000, 125e-5, 1000 * MB, LARGEST),
        (1, 1e-6, MB, MB // 16),  # no smaller ones, whatever the numbers say
        (float("inf"), 0.0, 0, MB // 16),
    ],
)
def test_buckets_by_the_speed_of_the_link(mbit: float, latency: float, total: int, bucket: int) -> None:
    assert LinkCost(latency, 8e-6 / mbit).bucket(total) == bucket


def test_noise_does_not_change_a_bucket() -> None:
    assert len({LinkCost(125e-6 * n, 8e-9).bucket(10 * MB) for n in (0.8, 1.0, 1.25)}) == 1


def test_a_byte_of_a_sum_is_sent_away_and_back() -> None:
    assert LinkCost.of_speed(1.0).seconds(125_000_000) == pytest.approx(1.0, rel=1e-3)


def test_what_the_user_says_counts_and_without_a_link_buckets_are_large() -> None:
    assert bucket_of(10 * MB, 7, LinkCost(1e-3, 8e-9)) == 7
    assert bucket_of(10 * MB, None, None) == LARGEST
    assert bucket_of(10 * MB, None, None, MB) == MB


def test_in_memory_a_bucket_has_half_of_all_gradients_at_most_where_that_is_a_megabyte() -> None:
    totals = 1, MB // 2, MB, 2 * MB, 3 * MB + 1, 8 * MB, 100 * MB
    found = [in_memory(total) for total in totals]
    assert found == [MB, MB, MB, MB, 3 * MB // 2 + 1, IN_MEMORY, IN_MEMORY]


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([3, 3, 3, 2], [[3], [3], [3, 2]]),  # 11 bytes are 3 buckets of 4
        ([1, 1, 1, 1, 1], [[1, 1, 1, 1], [1]]),  # as many as fit, where that is few enough
        ([1, 90, 1, 2, 2], [[1], [90], [1, 2], [2]]),  # a large one keeps no others
        ([3, 6], [[3], [6]]),
        ([3, 4, 3, 4], [[3], [4], [3], [4]]),
        ([0, 0], [[0, 0]]),
        ([], []),
    ],
)
def test_what_is_not_cut_apart_travels_in_few_runs(sizes: list[int], runs: list[list[int]]) -> None:
    assert [sizes[run] for run in few_runs(sizes, 4)] == runs


def test_runs_are_few_and_short() -> None:
    for sizes in itertools.product((1, 2, 3, 5, 8), repeat=5):
        runs = [sizes[run] for run in few_runs(sizes, 4)]
        assert tuple(itertools.chain(*runs)) == sizes
        assert len(runs) <= -(-sum(sizes) // 4)
        assert all(sum(run) < 8 for run in runs if len(run) > 1)
