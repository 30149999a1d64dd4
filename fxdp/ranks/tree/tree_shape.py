"""Who is whose parent: ranks of one host below their first one, the first ones of all hosts below rank 0.

    host a   0 ── 1, 2, 3            16 children at most: a rank has 17 connections, whatever the number of
             ├─ host b   4 ── 5, 6   ranks, and 8,192 ranks on 1,024 hosts are five levels
             └─ host c   7 ── 8, 9

So a value crosses the network once per host in each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxdp.ir.transports import NEIGHBOURS

ARITY = NEIGHBOURS - 1  # one is the parent
"""The most children of a rank; of the first one of a host half of them there, if there are other hosts."""


@dataclass(frozen=True)
class TreePlace:
    """The place of one rank in the tree.

    Attributes
    ----------
    size : how many ranks the tree has.
    parent : None for the root, which is rank 0.
    children : in ascending order.
    counts : how many ranks there are below and including each child.
    order : for the root: the ranks, each before its children, in which their values arrive.
    """

    size: int
    parent: int | None
    children: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


def tree_places(hosts: Sequence[str], arity: int = ARITY) -> list[TreePlace]:
    """The place of each rank, given the host of each."""
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
    """Put all `ranks` below the first of them, level by level."""
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
