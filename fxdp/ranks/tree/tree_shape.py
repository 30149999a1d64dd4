"""Shape of the tree: the ranks of a host are below its first rank, the first ranks of all hosts below rank 0.

    host a   0 ── 1, 2, 3            16 children at most: a rank has 17 connections, for any number of
             ├─ host b   4 ── 5, 6   ranks, and 8,192 ranks on 1,024 hosts are five levels
             └─ host c   7 ── 8, 9

So a value crosses the network once per host in each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxdp.ir.network.transports import NEIGHBOURS

ARITY = NEIGHBOURS - 1  # one neighbor is the parent
"""Most children of a rank; with several hosts, a host's first rank has at most half as many on the host."""


@dataclass(frozen=True)
class TreePlace:
    """The place of one rank in the tree.

    Attributes
    ----------
    size : number of ranks in the tree.
    parent : the parent's rank; None for the root, which is rank 0.
    children : the children's ranks, in ascending order.
    counts : number of ranks below and including each child.
    order : for the root, all ranks in the order in which their values arrive: parents before children.
    """

    size: int
    parent: int | None
    children: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


def tree_places(hosts: Sequence[str], arity: int = ARITY) -> list[TreePlace]:
    """Return the place of each rank, given the host of each rank."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    children: dict[int, list[int]] = {rank: [] for rank in range(len(hosts))}
    leaders = [group[0] for group in by_host.values()]
    if len(leaders) > 1:
        arity = max(arity, 2)
    for group in by_host.values():
        _fill(children, group, {group[0]: arity if len(leaders) == 1 else arity // 2}, arity)
    _fill(children, leaders, {leader: arity - len(children[leader]) for leader in leaders}, arity)
    return _places(len(hosts), {rank: sorted(below) for rank, below in children.items()})


def _fill(
    children: Mapping[int, list[int]], ranks: Sequence[int], room: Mapping[int, int], arity: int
) -> None:
    """Put all `ranks` below the first one, level by level."""
    parents = deque(ranks)
    left = room.get(parents[0], arity)
    for rank in ranks[1:]:
        while not left:
            parents.popleft()
            left = room.get(parents[0], arity)
        children[parents[0]].append(rank)
        left -= 1


def _places(size: int, children: Mapping[int, Sequence[int]]) -> list[TreePlace]:
    order: list[int] = []
    ahead = [0]
    while ahead:
        order.append(ahead.pop())
        ahead.extend(reversed(children[order[-1]]))
    count, parent = [1] * size, dict.fromkeys(range(size))
    for rank in reversed(order):
        for child in children[rank]:
            count[rank] += count[child]
            parent[child] = rank
    return [
        TreePlace(
            size, parent[rank], tuple(children[rank]), tuple(count[child] for child in children[rank]),
            () if rank else tuple(order),
        )
        for rank in range(size)
    ]  # fmt: skip
