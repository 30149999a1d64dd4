"""Rounds of small values: in order, by rank, without a hang whatever their size or whoever leaves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.messages import LinkBrokenError, Messages
from tests.limits import HANG_S, SOON_S, scaled
from tests.ranks.tree.small_trees import together


@pytest.fixture
def three() -> Iterator[list[Messages]]:
    """Three ranks in one process."""
    with _ranks(3) as made:
        yield made


@contextlib.contextmanager
def _ranks(size: int, timeout_s: float = HANG_S) -> Iterator[list[Messages]]:
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            connections[low][high], connections[high][low] = socket.socketpair()
    for own in connections:
        for connection in own.values():
            connection.setblocking(False)
    made = [Messages(rank, own, timeout_s) for rank, own in enumerate(connections)]
    try:
        yield made
    finally:
        for messages in made:
            messages.close()


def _value(rank: int, number: int, size: int) -> bytes:
    return bytes([16 * rank + number]) * size


def test_every_rank_gets_the_others_values(three: list[Messages]) -> None:
    def action(messages: Messages) -> dict[int, bytes]:
        parts = messages.finish(messages.start(memoryview(_value(messages.rank, 1, 5))))
        return {rank: bytes(part) for rank, part in parts.items()}

    for rank, parts in enumerate(together(three, action)):
        assert parts == {other: _value(other, 1, 5) for other in range(3) if other != rank}
    assert [r.rounds for r in three] == [1] * 3


def test_rounds_may_be_finished_in_any_order(three: list[Messages]) -> None:
    def action(messages: Messages) -> list[bytes]:
        begun = [messages.start(memoryview(_value(messages.rank, n, n))) for n in range(4)]
        order = begun[:: 1 if messages.rank else -1]
        for one in order:
            messages.finish(one)
        return [bytes(one.parts[(messages.rank + 1) % 3]) for one in begun]

    for rank, values in enumerate(together(three, action)):
        assert values == [_value((rank + 1) % 3, n, n) for n in range(4)]


def test_values_larger_than_all_buffers_do_not_block(three: list[Messages]) -> None:
    size = 8 << 20

    def action(messages: Messages) -> list[int]:
        begun = [messages.start(memoryview(_value(messages.rank, n, size))) for n in range(2)]
        return [messages.finish(one)[(messages.rank + 1) % 3][-1] for one in begun]

    assert together(three, action) == [[16 * ((rank + 1) % 3) + n for n in range(2)] for rank in range(3)]


def test_a_finished_round_is_sent_though_more_are_in_flight() -> None:
    """A rank that went on with a part unsent would wait elsewhere for a rank that waits for that part."""
    with _ranks(2) as (first, second):
        first._peers[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        size, finished = 100_000, threading.Event()

        def action(messages: Messages) -> bool:
            begun, _ = [messages.start(memoryview(_value(messages.rank, n, size))) for n in range(2)]
            messages.finish(begun)
            if messages is second:
                finished.set()
            return finished.wait(SOON_S)

        assert together([first, second], action) == [True, True]


@pytest.mark.parametrize("leaves", ["before", "meanwhile", "half-way"])
def test_a_rank_that_leaves_ends_the_wait(three: list[Messages], leaves: str) -> None:
    begun = [rank.start(memoryview(b"mine")) for rank in three[:2]]
    if leaves == "half-way":
        three[2]._peers[0].connection.send(b"\x01\x00")
    if leaves != "meanwhile":
        three[2].cut()
    else:
        threading.Timer(0.05, three[2].cut).start()
    with pytest.raises(LinkBrokenError, match="the connection to rank 2 was closed by peer"):
        three[0].finish(begun[0])
    three[1].start(memoryview(b"again"))
    with pytest.raises(LinkBrokenError, match="the connection to rank 2 was closed by peer"):
        three[1].finish(begun[1])


def test_cut_ends_the_own_wait(three: list[Messages]) -> None:
    begun = three[0].start(memoryview(b"mine"))
    threading.Timer(0.05, three[0].cut).start()
    with pytest.raises(LinkBrokenError):
        three[0].finish(begun)


def test_a_rank_that_does_not_come_is_named() -> None:
    with _ranks(3, timeout_s=scaled(0.1)) as (first, second, _):
        second.start(memoryview(b"1234"))
        with pytest.raises(RankFailedError, match=rf"rank 2 did not come to a sum within {scaled(0.1):g} s"):
            first.finish(first.start(memoryview(b"1234")))


def test_programs_that_have_come_apart_are_noticed() -> None:
    with _ranks(2) as (first, second):
        second.start(memoryview(b"12345678"))
        with pytest.raises(RankFailedError, match="sent round 1 of 8 bytes; expected round 1 of 4 bytes"):
            first.finish(first.start(memoryview(b"1234")))
