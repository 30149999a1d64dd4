"""Frames between ranks: bounded before anything is kept for them, and harmless to show."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms import channel
from fxdp.ranks.comms.channel import RefusedError
from fxdp.ranks.comms.control import Control
from fxdp.ranks.liveness.departure import Departure, DepartureKind, harmless
from tests.limits import HANG_S, SOON_S, scaled

_HEADER = struct.Struct("<BIi")


@contextlib.contextmanager
def _rank_and_wire(timeout_s: float = HANG_S) -> Iterator[tuple[Control, socket.socket]]:
    """A rank's control channel, and the bare connection of the other."""
    own, wire = socket.socketpair()
    own.setblocking(False)
    made = Control(0, {1: own}, timeout_s)
    with wire, contextlib.closing(made):
        yield made, wire


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (_HEADER.pack(77, 5, 1) + b"hello", "a frame of kind 77"),
        (_HEADER.pack(0, 0xFFFFFFFF, 1), "a frame of 4294967295 bytes"),
        (_HEADER.pack(2, 1 << 20, 1), "a frame of 1048576 bytes"),
        (_HEADER.pack(6, 3, 1) + b"123", "a frame of 3 bytes"),
        (b"GET / HTTP/1.1\r\n", "a frame of kind 71"),
    ],
)
def test_what_is_no_frame_ends_the_wait_at_once(frame: bytes, words: str) -> None:
    with _rank_and_wire() as (rank, wire):
        wire.sendall(frame)
        expected = rf"rank 1 sent what this rank does not understand \({words}\); expected the same release"
        with pytest.raises(RankFailedError, match=expected):
            rank.exchange(b"mine")
        wire.settimeout(HANG_S)
        while wire.recv(100):  # the connection has ended: the watch notices, too
            pass


def test_frames_in_pieces_and_a_last_word() -> None:
    with _rank_and_wire() as (rank, wire):
        data = _HEADER.pack(0, 3, 1) + b"abc" + _HEADER.pack(0, 1, 1) + b"d"
        for byte in data:
            wire.send(bytes([byte]))
        assert [rank.exchange(b"1"), rank.exchange(b"2")] == [[b"1", b"abc"], [b"2", b"d"]]
        wire.sendall(_HEADER.pack(2, 8, 1) + b"a\x1b[2J\xff\x9b;")
        with pytest.raises(RankFailedError) as caught:
            rank.exchange(b"3")
        assert str(caught.value) == "rank 1 failed: a\\x1b[2J\ufffd\ufffd;"


def test_the_watch_leaves_data_to_a_thread_that_waits() -> None:
    """What arrives between the look of a wait and its sleep stays unread by the watch, and ends the sleep."""
    with _rank_and_wire() as (rank, wire):
        plain, found = rank._poll, list[object]()

        class Poll:
            def poll(self, timeout: int) -> list[tuple[int, int]]:
                wire.sendall(_HEADER.pack(0, 1, 1) + b"x")
                watch = threading.Thread(target=rank.drain_all)
                watch.start()
                watch.join()
                found.append(plain.poll(timeout))
                return plain.poll(0)

        rank._poll = Poll()  # type: ignore[assignment]
        assert rank.exchange(b"mine") == [b"mine", b"x"]
        assert len(found) == 1
        assert found[0]


def test_a_refusal_cannot_write_to_the_terminal() -> None:
    with _rank_and_wire() as (rank, wire):
        wire.sendall(_HEADER.pack(1, 8, 1) + "\x1b]0;\u202ex".encode())
        with pytest.raises(RefusedError) as caught:
            rank.exchange(b"3")
        assert str(caught.value) == "rank 1 failed: \\x1b]0;\\u202ex"


def test_text_is_cut_and_data_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "DATA_BYTES", 10)
    with _rank_and_wire() as (rank, wire):
        with pytest.raises(StateError, match="11 bytes are more than ranks tell each other"):
            rank.start(b"12345678901")
        rank.broadcast_failure(Departure(0, DepartureKind.FAILED, "\u20ac" * 100_000))
        found = bytearray()
        while data := wire.recv(1 << 20):
            found += data
        assert len(found) == _HEADER.size + (1 << 16)


def test_news_are_those_of_a_failure_first() -> None:
    with _rank_and_wire() as (rank, wire):
        assert rank.news() is None
        wire.sendall(_HEADER.pack(3, 0, 5))
        assert rank.news() == Departure(5, DepartureKind.KILLED)


def test_a_rank_is_outlasted_until_its_process_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        wire, _ = listener.accept()
    own.setblocking(False)
    with contextlib.closing(Control(0, {1: own}, HANG_S)) as rank:
        wire.sendall(_HEADER.pack(2, 1, 1) + b"x")
        wire.shutdown(socket.SHUT_WR)
        failed = rank.drain(rank.peers[0])
        assert failed is not None
        rank.broadcast_failure(failed)
        begin = time.monotonic()
        rank.outlast(1, begin + 0.2)
        assert time.monotonic() - begin >= 0.2
        threading.Timer(0.1, wire.close).start()
        rank.outlast(1, begin + HANG_S)
        assert time.monotonic() - begin < SOON_S


def test_plain_text_stays() -> None:
    plain = "line 1\n\tthe \u00e9tat \u4e2d\u6587 \U0001f600"
    assert harmless(plain) == plain
    assert harmless("\x07\x00\u2028\x7f") == "\\x07\\x00\\u2028\\x7f"


def test_errors_name_ranks_by_their_global_numbers() -> None:
    with _rank_and_wire() as (made, wire):
        made.names = (4, 6)
        wire.sendall(_HEADER.pack(1, 3, 1) + b"why")
        with pytest.raises(RefusedError, match=r"^rank 6 failed: why$"):
            made.exchange(b"mine")
        wire.sendall(_HEADER.pack(2, 3, 1) + b"bad")
        with pytest.raises(RankFailedError, match=r"^rank 6 failed: bad$"):
            made.exchange(b"mine")
    with _rank_and_wire(timeout_s=scaled(0.05)) as (made, wire):
        made.names = (4, 6)
        with pytest.raises(RankFailedError, match=rf"^rank 6 did not come within {scaled(0.05):g} s"):
            made.exchange(b"mine")
