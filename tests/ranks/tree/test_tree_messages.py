"""Sums and gathers by a tree: the same bits on all ranks, no hang, and who is late is named from afar."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.messages import LinkBrokenError, OutOfOrderError
from fxdp.ranks.tree.tree_messages import TreeMessages
from tests.limits import scaled
from tests.ranks.tree.small_trees import late_words, together, tree


def _added(values: Sequence[memoryview]) -> memoryview:
    rows = [struct.unpack(f"<{len(value) // 8}q", value) for value in values]
    return memoryview(bytearray(struct.pack(f"<{len(rows[0])}q", *map(sum, zip(*rows, strict=True)))))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 70), st.integers(1, 16), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=3))
def test_sums_and_gathers_of_any_number_of_ranks(
    size: int, arity: int, hosts: int, widths: list[int]
) -> None:
    """Several under way, finished in another order than they were begun in."""

    def run(rank: TreeMessages) -> tuple[list[Any], list[Any]]:
        own = [[rank.rank + 1000 * i] * width for i, width in enumerate(widths)]
        values = [memoryview(bytearray(struct.pack(f"<{len(each)}q", *each))) for each in own]
        sums = [rank.start_sum(value, _added) for value in values]
        gathers = [rank.start(value) for value in values]
        found = [rank.finish(begun) for begun in gathers]
        return [bytes(rank.finish(begun)[rank.rank]) for begun in sums], [
            {other: bytes(part)[:8] for other, part in parts.items()} for parts in found
        ]

    total = size * (size - 1) // 2
    with tree(TreeMessages, [str(rank * 7 % hosts) for rank in range(size)], arity) as ranks:
        for rank, (sums, gathers) in enumerate(together(ranks, run)):
            for i, width in enumerate(widths):
                assert sums[i] == struct.pack("<q", total + 1000 * i * size) * width
                assert gathers[i] == {
                    other: struct.pack("<q", other + 1000 * i) * (width > 0)
                    for other in range(size)
                    if other != rank
                }


def test_large_values_do_not_block() -> None:
    def run(rank: TreeMessages) -> int:
        begun = [rank.start_sum(memoryview(bytearray(1 << 22)), lambda values: values[0]) for _ in range(2)]
        return sum(len(rank.finish(one)[rank.rank]) for one in begun)

    with tree(TreeMessages, ["a"] * 7, 2) as ranks:
        assert together(ranks, run) == [1 << 23] * 7


@pytest.mark.parametrize("leaves", [0, 1, 4])
def test_a_rank_that_leaves_ends_the_wait_of_its_neighbours(leaves: int) -> None:
    def run(rank: TreeMessages) -> str:
        if rank.rank == leaves:
            rank.cut()
            return ""
        try:
            rank.finish(rank.start_sum(memoryview(bytearray(8)), _added))
        except LinkBrokenError as error:
            rank.cut()  # as the watch does
            return str(error)
        return "no error"

    with tree(TreeMessages, ["a"] * 7, 2) as ranks:
        found = together(ranks, run)
    assert all("the connection to rank" in text for rank, text in enumerate(found) if rank != leaves)


def test_all_name_the_rank_that_is_late_however_far_it_is() -> None:
    def sums(rank: TreeMessages) -> None:
        for _ in range(2):
            rank.finish(rank.start_sum(memoryview(bytearray(8)), _added))

    late = [0, 1, 5, 6]
    for rank, texts in zip(late, late_words(TreeMessages, sums, late, scaled(4.5)), strict=True):
        words = f"rank {100 + rank} did not come to a sum within {scaled(4.5):g} s"
        assert len(texts) == 6
        assert all(text.startswith(words) for text in texts), texts


def test_a_value_of_another_moment_is_noticed_by_both_sides() -> None:
    with tree(TreeMessages, ["a"] * 3, 2) as ranks:
        number = ranks[1].sequence_log.add_module("Net")
        ranks[1].sequence_log.begin_call(number, 1)
        begun = ranks[1].start_sum(memoryview(bytearray(8)), _added)
        ranks[2].start_sum(memoryview(bytearray(8)), _added)
        with pytest.raises(OutOfOrderError) as caught:
            ranks[0].finish(ranks[0].start_sum(memoryview(bytearray(8)), _added))
        assert caught.value.args == (1, ranks[1].sequence_log.now, 0)
        with pytest.raises(OutOfOrderError) as caught:
            ranks[1].finish(begun)
        assert caught.value.args == (0, 0, ranks[1].sequence_log.now)


def test_sizes_that_come_apart_are_noticed() -> None:
    with tree(TreeMessages, ["a"] * 2) as ranks:
        ranks[1].start_sum(memoryview(b"1234567890"), _added)
        with pytest.raises(RankFailedError, match="sent round 1 of 10 bytes; expected round 1 of 8 bytes"):
            ranks[0].finish(ranks[0].start_sum(memoryview(bytearray(8)), _added))
