"""Ranks find each other, whoever else calls and in whatever pieces, and hear of those that will not come."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fxdp.errors import MeshError, RankFailedError
from fxdp.ranks.comms import accepting, handshake
from fxdp.ranks.comms.rendezvous import connect_all
from fxdp.ranks.liveness.failure_broadcast import _EVERYWHERE, FailureBroadcast, _tell
from tests.limits import HANG_S, scaled

_HOST = "127.0.0.1"
Store = Any


class _Ranks:
    """Ranks of one mesh as threads, which start when they are asked for."""

    def __init__(self, size: int, timeout_s: float = HANG_S) -> None:
        self.store: Store = dist.HashStore()
        self._size = size
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(size)

    def start(self, rank: int, planes: list[list[int]] | None = None) -> Future[Any]:
        failure_broadcast = FailureBroadcast(self.store, "fxdp/x/1", range(self._size), rank)
        among = planes or [list(range(self._size))]
        run = connect_all
        return self._pool.submit(
            run, self.store, "fxdp/x/1", rank, among, _HOST, self._timeout_s, failure_broadcast.look
        )

    def address(self, rank: int) -> tuple[str, int]:
        self.store.wait([f"fxdp/x/1/{rank}"], timedelta(seconds=HANG_S))
        host, port, _ = self.store.get(f"fxdp/x/1/{rank}").decode().split()
        return host, int(port)

    def token(self) -> bytes:
        return bytes.fromhex(self.store.get("fxdp/x/1/token").decode().split()[0])


@pytest.fixture
def two() -> _Ranks:
    return _Ranks(2)


def _talk(made: list[list[dict[int, socket.socket]]], plane: int = 0) -> dict[tuple[int, int], bytes]:
    """What each rank hears of each other one after all have said who they are; closes all."""
    for rank, planes in enumerate(made):
        for other, connection in planes[plane].items():
            connection.setblocking(True)
            connection.sendall(bytes([rank, other]))
    found = {(r, o): c.recv(2) for r, planes in enumerate(made) for o, c in planes[plane].items()}
    for planes in made:
        for connection in planes[plane].values():
            connection.close()
    return found


def test_all_are_connected_to_all_and_rows_among_themselves() -> None:
    ranks = _Ranks(4)
    futures = [ranks.start(r, [[0, 1, 2, 3], [0, 2] if r % 2 == 0 else [1, 3]]) for r in (3, 0, 2, 1)]
    made = [futures[i].result(HANG_S) for i in (1, 3, 2, 0)]
    assert [sorted(planes[1]) for planes in made] == [[2], [3], [0], [1]]
    assert _talk(made, 1) == {(r, (r + 2) % 4): bytes([(r + 2) % 4, r]) for r in range(4)}
    assert _talk(made) == {(r, o): bytes([o, r]) for r in range(4) for o in range(4) if r != o}


@contextlib.contextmanager
def _strangers(address: tuple[str, int], words: list[bytes]) -> Iterator[list[socket.socket]]:
    callers = [socket.create_connection(address, timeout=HANG_S) for _ in words]
    for caller, text in zip(callers, words, strict=True):
        caller.sendall(text)
    yield callers
    for caller in callers:
        caller.close()


def test_strangers_that_say_nothing_or_nonsense_cost_nothing(two: _Ranks) -> None:
    first = two.start(0)
    wrong_token = handshake.hello(b"?" * 16, 1, 0)
    words = [b""] * 100 + [b"GET / HTTP/1.0\r\n\r\n", b"fx", b"\x16\x03\x01" * 50, wrong_token]
    with _strangers(two.address(0), words) as callers:
        second = two.start(1)
        _talk([first.result(HANG_S), second.result(HANG_S)])
        callers[-1].settimeout(HANG_S)
        assert callers[-1].recv(100) == b"", "turned away"


def test_a_hello_in_pieces_is_read_whole_and_welcomed(two: _Ranks) -> None:
    first = two.start(0)
    address = two.address(0)
    with socket.create_connection(address, timeout=HANG_S) as caller:
        for byte in handshake.hello(two.token(), 1, 0):
            caller.sendall(bytes([byte]))
            time.sleep(0.002)
        assert caller.recv(100) == handshake.welcome(0)
        first.result(HANG_S)[0][1].close()


def test_a_caller_that_is_not_welcomed_calls_again(two: _Ranks) -> None:
    with socket.create_server((_HOST, 0)) as listener:
        two.store.set("fxdp/x/1/token", "00" * 16 + " 0")
        two.store.set("fxdp/x/1/0", f"{_HOST} {listener.getsockname()[1]} 0")
        second = two.start(1)
        listener.accept()[0].close()
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == handshake.hello(bytes(16), 1, 0)
            connection.sendall(handshake.welcome(0)[:4])
            connection.sendall(handshake.welcome(0)[4:])
            second.result(HANG_S)[0][0].close()


def test_another_version_of_fxdp_is_named(two: _Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first = two.start(0)
    address = two.address(0)
    monkeypatch.setattr(handshake, "_VERSION", 7)
    hello = handshake.hello(two.token(), 1, 0)
    monkeypatch.undo()
    with _strangers(address, [hello]), pytest.raises(MeshError, match="rank 1 speaks version 7 of fxdp's"):
        first.result(HANG_S)


def test_all_that_are_missing_are_named() -> None:
    ranks = _Ranks(4, timeout_s=scaled(1.0))
    first, second = ranks.start(0), ranks.start(2)
    with pytest.raises(RankFailedError, match=f"rank 1, 3 did not join the mesh within {scaled(1.0):g} s"):
        first.result(HANG_S)
    with pytest.raises(RankFailedError, match=f"rank 1 did not join the mesh within {scaled(1.0):g} s"):
        second.result(HANG_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_says_before_it_ends_reaches_those_that_wait(two: _Ranks, rank: int) -> None:
    waiting = two.start(rank)
    time.sleep(0.1)
    _tell(two.store, _EVERYWHERE, 5, "ValueError: of another mesh")
    _tell(two.store, _EVERYWHERE, rank, "ValueError: an older one of this rank")
    _tell(two.store, _EVERYWHERE, 1 - rank, "ValueError: no \x1b[31mdata")
    with pytest.raises(RankFailedError, match=rf"rank {1 - rank} failed: ValueError: no \\x1b\[31mdata"):
        waiting.result(HANG_S)


def test_a_rank_that_was_met_and_ends_is_named() -> None:
    ranks = _Ranks(3)
    first = ranks.start(0)
    with _strangers(ranks.address(0), [handshake.hello(ranks.token(), 1, 0)]) as (second,):
        assert second.recv(100) == handshake.welcome(0)
    with pytest.raises(RankFailedError, match="rank 1 ended without an error message"):
        first.result(HANG_S)


def test_a_rank_that_has_published_its_address_and_ends_is_named(
    two: _Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PROBE_S", 0.1)
    first = two.start(0)
    with socket.create_server((_HOST, 0)) as gone:
        port = gone.getsockname()[1]
    two.store.set("fxdp/x/1/1", f"{_HOST} {port} 0")
    with pytest.raises(RankFailedError, match="rank 1 ended without an error message"):
        first.result(HANG_S)


def test_an_address_that_nobody_has(two: _Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "_UNREACHABLE_S", 0.3)
    with socket.create_server((_HOST, 0)) as gone:
        port = gone.getsockname()[1]
    two.store.set("fxdp/x/1/token", "00" * 16 + " 0")
    two.store.set("fxdp/x/1/0", f"{_HOST} {port} 0")
    with pytest.raises(MeshError, match=rf"rank 0 cannot be reached at 127.0.0.1:{port} .*set FXDP_HOST"):
        two.start(1).result(HANG_S)


class _LostStore:
    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        return fail


def test_a_store_that_is_gone() -> None:
    with pytest.raises(RankFailedError, match=r"the process that has it \(rank 0, or torchrun's agent\)"):
        connect_all(_LostStore(), "x", 1, [[0, 1]], _HOST, HANG_S)


def test_too_many_open_files_are_no_wrong_address(two: _Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", full)
    words = r"joining 2 ranks .*could not open one more.*`ulimit -n \d+`"
    with pytest.raises(MeshError, match=words) as caught:
        two.start(0).result(HANG_S)
    assert "FXDP_HOST" not in str(caught.value)


def test_a_host_that_is_not_this_machine(two: _Ranks) -> None:
    with pytest.raises(MeshError, match=r"cannot listen at 203\.0\.113\.1; .*set FXDP_HOST"):
        connect_all(two.store, "x", 0, [[0, 1]], "203.0.113.1", 1.0)


def test_nothing_is_left_open(two: _Ranks) -> None:
    before = set(threading.enumerate())  # some of another test may end meanwhile
    with pytest.raises(RankFailedError):
        connect_all(two.store, "y", 0, [[0, 1]], _HOST, 0.1)
    assert set(threading.enumerate()) <= before
