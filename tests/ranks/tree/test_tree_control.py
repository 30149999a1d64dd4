"""Rounds by a tree: every rank gets what all say, or who refused, or who ended, of any number of ranks."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.channel import RefusedError
from fxdp.ranks.comms.frames import FrameKind, framed
from fxdp.ranks.liveness.departure import Departure, DepartureKind
from fxdp.ranks.tree.tree_control import TreeControl
from tests.limits import HANG_S, SOON_S, scaled
from tests.ranks.tree.small_trees import late_words, settle, together, tree

_SIZES = st.integers(0, 3) | st.integers(0, 2**40)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 70), st.integers(1, 16), st.integers(1, 5), st.data())
def test_every_rank_gets_all_sizes(size: int, arity: int, hosts: int, data: st.DataObject) -> None:
    """Ranks begin, and read, in any order; some refuse a round: then it is refused on all others."""
    with tree(TreeControl, [str(rank * 7 % hosts) for rank in range(size)], arity) as ranks:
        for number in range(3):
            sizes = data.draw(st.lists(_SIZES, min_size=size, max_size=size) | st.just([7] * size))
            refusing = data.draw(st.sets(st.integers(0, size - 1), max_size=2)) if number == 1 else set()
            for rank in data.draw(st.permutations(range(size))):
                if rank in refusing:
                    ranks[rank].refuse(f"no {rank}")
                else:
                    ranks[rank].start(struct.pack("<qq", 5, sizes[rank]))
                if data.draw(st.booleans()):
                    settle(ranks[rank : rank + 3])
            settle(ranks)
            for rank in set(range(size)) - refusing:
                if not refusing:
                    found = [struct.unpack("<qq", part) for part in ranks[rank].finish()]
                    assert found == [(5, each) for each in sizes]
                    continue
                with pytest.raises(RefusedError) as caught:
                    ranks[rank].finish()
                lines = {f"rank {other} failed: no {other}" for other in refusing}
                assert set(str(caught.value).splitlines()) <= lines


def test_refusals_and_rounds_of_threads_stay_in_step() -> None:
    """A rank that refuses goes on at once, and is rounds ahead of the others."""

    def run(control: TreeControl) -> list[object]:
        found: list[object] = []
        for number in range(60):
            if number % 7 == control.rank:
                control.refuse(f"{number}")
                found.append("refused")
                continue
            try:
                found.append([part[0] for part in control.exchange(bytes([number]))])
            except RefusedError as error:
                found.append(str(error))
        return found

    with tree(TreeControl, ["a"] * 7, 2) as ranks:
        for rank, found in enumerate(together(ranks, run)):
            for number, said in enumerate(found):
                words = f"rank {number % 7} failed: {number}"
                assert said == ("refused" if number % 7 == rank else words)


def test_values_of_any_size_arrive() -> None:
    def run(control: TreeControl) -> list[int]:
        return [sum(map(len, control.exchange(bytes(n * (control.rank + 1))))) for n in (0, 10, 1_000_000)]

    with tree(TreeControl, ["a"] * 6, 2) as ranks:
        assert together(ranks, run) == [[0, 210, 21_000_000]] * 6


@pytest.mark.parametrize("guilty", [0, 1, 6])
@pytest.mark.parametrize("how", ["killed", "failed", "left"])
def test_the_end_of_any_rank_reaches_all_others_in_a_round(guilty: int, how: str) -> None:
    with tree(TreeControl, ["a"] * 12, 2) as ranks:
        others = [rank for rank in ranks if rank.rank != guilty]
        for rank in others:
            rank.start(b"mine")
        if how == "killed":
            for peer in ranks[guilty].peers:
                peer.connection.close()
        else:
            kind = DepartureKind.FAILED if how == "failed" else DepartureKind.ENDED
            ranks[guilty].broadcast_failure(Departure(guilty, kind, "the reason" if how == "failed" else ""))
        settle(others)
        words = {"killed": "ended without an error", "failed": "failed: the reason", "left": "ended its"}
        for rank in others:
            with pytest.raises(RankFailedError, match=f"^rank {guilty} {words[how]}"):
                rank.finish()


def test_who_has_the_answer_is_not_disturbed_by_those_who_leave() -> None:
    with tree(TreeControl, ["a"] * 8, 2) as ranks:
        for rank in ranks:
            rank.start(b"mine")
        for _ in range(20):
            for rank in ranks[:4]:
                for peer in rank.peers:
                    rank._progress(peer)
            for peer in ranks[7].peers:
                ranks[7]._progress(peer)
        settle(ranks[:4])
        for rank in (ranks[0], ranks[7]):
            for peer in rank.peers:
                rank._progress(peer)
        settle(ranks)
        ranks[3].broadcast_failure(Departure(3, DepartureKind.ENDED))
        settle(ranks)
        for rank in ranks:
            assert list(rank.finish()) == [b"mine"] * 8
        for rank in ranks:
            if rank.rank != 3:
                assert rank.left == Departure(3, DepartureKind.ENDED)


def test_all_name_the_rank_that_is_late_however_far_it_is() -> None:
    late = [0, 1, 5, 6]
    found = late_words(TreeControl, lambda control: control.exchange(b"mine"), late, scaled(5.0))
    for rank, texts in zip(late, found, strict=True):
        words = f"rank {100 + rank} did not come within {scaled(5.0):g} s, though its process is alive"
        assert len(texts) == 6
        assert all(text.startswith(words) for text in texts), texts


def test_a_rank_that_waits_says_where_it_is_to_its_neighbours() -> None:
    with tree(TreeControl, ["a"] * 3, 1, timeout_s=scaled(1.5)) as ranks:
        ranks[1].waits_for = lambda: b"here"
        with pytest.raises(RankFailedError):
            ranks[1].exchange(b"mine")
        for other in (0, 2):
            peer = next(peer for peer in ranks[other].peers if peer.rank == 1)
            ranks[other].drain(peer)
            assert peer.waits == (1, b"here")


def test_the_end_of_a_rank_is_outlasted_by_way_of_who_told() -> None:
    """Ranks end one after the other, away from the one at fault."""
    with tree(TreeControl, ["a"] * 3, 1) as ranks:
        ranks[2].broadcast_failure(Departure(2, DepartureKind.FAILED, "x"))
        settle(ranks)
        assert ranks[0].news() == Departure(2, DepartureKind.FAILED, "x")
        begin = time.monotonic()
        ranks[0].outlast(2, begin + 0.2)
        assert time.monotonic() - begin >= 0.2
        ranks[1].peers[0].connection.close()
        ranks[0].outlast(2, begin + HANG_S)
        assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize(
    ("kind", "content"),
    [(FrameKind.DATA, b"nonsense"), (FrameKind.DATA, b"\x01" + b"\xff" * 40), (FrameKind.REFUSED, b"{{")],
)
def test_nonsense_of_a_child_stops_all(kind: FrameKind, content: bytes) -> None:
    with tree(TreeControl, ["a"] * 3, 2) as ranks:
        ranks[0].start(b"mine")
        ranks[2].start(b"mine")
        ranks[1]._send(ranks[1].peers[0], framed(kind, content, 1))
        settle([ranks[0], ranks[2]])
        for rank in (ranks[0], ranks[2]):
            with pytest.raises(RankFailedError, match=r"rank 1 (sent what|failed: refused this call)"):
                rank.finish()
