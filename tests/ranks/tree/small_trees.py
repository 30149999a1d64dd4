"""Trees of ranks in one process: each connection is a pair of sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fxdp.ranks.tree.tree_control import TreeControl
from fxdp.ranks.tree.tree_messages import TreeMessages
from fxdp.ranks.tree.tree_shape import TreePlace, tree_places

T = TypeVar("T", TreeControl, TreeMessages)


@contextlib.contextmanager
def tree(
    kind: Callable[[int, TreePlace, dict[int, socket.socket], float], T],
    hosts: Sequence[str],
    arity: int = 16,
    timeout_s: float = 10.0,
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


def settle(ranks: Sequence[TreeControl]) -> None:
    """Let each rank read what there is, until nothing moves any more."""
    before: Any = None
    while (now := [_state(rank) for rank in ranks]) != before:
        before = now
        for rank in ranks:
            for peer in rank.peers:
                rank._progress(peer)


def _state(rank: TreeControl) -> Any:
    peers = [(len(p.rounds), p.ignore, len(p.unread), len(p.unsent), p.ending, p.closed) for p in rank.peers]
    return rank.round, rank._open, rank._risen, rank._answer is None, rank.silent, rank.left, peers
