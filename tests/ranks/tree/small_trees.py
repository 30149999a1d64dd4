"""Trees of ranks in one process: each connection is a pair of sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fxdp.errors import RankFailedError
from fxdp.ranks.tree.tree_control import TreeControl
from fxdp.ranks.tree.tree_messages import TreeMessages
from fxdp.ranks.tree.tree_shape import TreePlace, tree_places
from tests.limits import HANG_S

T = TypeVar("T", TreeControl, TreeMessages)


@contextlib.contextmanager
def tree(
    kind: Callable[[int, TreePlace, dict[int, socket.socket], float], T],
    hosts: Sequence[str],
    arity: int = 16,
    timeout_s: float = HANG_S,
) -> Iterator[list[T]]:
    """One rank per entry of `hosts`."""
    places = tree_places(hosts, arity)
    connections: list[dict[int, socket.socket]] = [{} for _ in hosts]
    for rank, place in enumerate(places):
        if place.parent is not None:
            connections[rank][place.parent], connections[place.parent][rank] = socket.socketpair()
    for own in connections:
        for connection in own.values():
            connection.setblocking(False)
    made = [kind(rank, places[rank], connections[rank], timeout_s) for rank in range(len(hosts))]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def together(ranks: Sequence[T], action: Callable[[T], Any]) -> list[Any]:
    """What each rank's thread gives."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(action, ranks))


def late_words(
    kind: Callable[[int, TreePlace, dict[int, socket.socket], float], T],
    act: Callable[[T], Any],
    late: Sequence[int],
    timeout_s: float,
) -> list[list[str]]:
    """For each rank that does not act in a tree of seven, named 100 to 106: the errors of the others."""

    def run(missing: int) -> list[str]:
        found: list[str] = []

        def acting(rank: T) -> None:
            try:
                act(rank)
            except RankFailedError as error:
                found.append(str(error))

        with tree(kind, ["a"] * 7, 2, timeout_s) as ranks:
            for rank in ranks:
                rank.names = range(100, 107)
            threads = [threading.Thread(target=acting, args=(r,)) for r in ranks if r.rank != missing]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    with ThreadPoolExecutor(len(late)) as pool:  # all of them do nothing but wait
        return list(pool.map(run, late))


def settle(ranks: Sequence[TreeControl]) -> None:
    """Let each rank read what there is, until nothing moves any more."""
    before: Any = None
    while (now := [_state(rank) for rank in ranks]) != before:
        before = now
        for rank in ranks:
            for peer in rank.peers:
                rank._progress(peer)


def _state(rank: TreeControl) -> Any:
    peers = [
        (len(p.rounds), p.ignore, len(p.unread), len(p.unsent), p.departure, p.closed) for p in rank.peers
    ]
    return rank.round, rank._open, rank._risen, rank._answer is None, rank.silent, rank.left, peers
