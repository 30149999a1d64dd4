"""Prove that the ranks' programs cannot deadlock, even if every transfer blocks without a buffer.

    rank 0: send x to 1, recv z from 1        both transfers find their peers: proven
    rank 1: recv x from 0, send z to 0

    rank 0: recv z from 1, send x to 1        both ranks wait for each other: a cycle
    rank 1: recv x from 0, send z to 0

A program that passes cannot deadlock with buffers or asynchronous transfers either, nor on a device that
runs all transfers of one pair of ranks in the order in which they were started (NCCL).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import networkx

from fxdp.errors import DeadlockError
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.transfers import Edge, End, Event, Transfer


def check(ranks: Sequence[Sequence[Event]]) -> None:
    """Simulate all programs with blocking transfers until no rank can continue; raise unless all have ended.

    Raises
    ------
    DeadlockError : lists the cycle of ranks that wait for one another, or transfers without a counterpart,
        or
        values that are used before they are received or sent before they are computed.
    """
    if faults := [*_unpaired(ranks), *_out_of_place(ranks)]:
        shown = "\n".join(f"  {fault}" for fault in faults)
        raise DeadlockError(f"transfers that do not fit the actions:\n{shown}\n{_REMEDY}")
    heads = _advance(ranks)
    waits = networkx.DiGraph()
    for rank, row in enumerate(ranks):
        if heads[rank] < len(row):
            event = row[heads[rank]]
            assert isinstance(event, Transfer), "actions wait for nothing"
            waits.add_edge(rank, event.peer)
    if not waits:
        return
    lines = [f"  {_where(ranks, rank, heads[rank])}" for rank, _ in networkx.find_cycle(waits)]
    raise DeadlockError("these ranks wait for one another:\n" + "\n".join(lines) + f"\n{_REMEDY}")


_REMEDY = "expected each send to meet its receive: let `fxdp.pipeline.schedule.programs` place the transfers"


def _advance(ranks: Sequence[Sequence[Event]]) -> list[int]:
    """Return the position at which each rank can no longer continue."""
    heads = [0] * len(ranks)
    todo = list(range(len(ranks)))
    while todo:
        rank = todo.pop()
        while heads[rank] < len(ranks[rank]):
            event = ranks[rank][heads[rank]]
            if isinstance(event, Transfer):
                peer = ranks[event.peer]
                if heads[event.peer] == len(peer) or peer[heads[event.peer]] != _other_end(event, rank):
                    break
                heads[event.peer] += 1
                todo.append(event.peer)
            heads[rank] += 1
    return heads


def _other_end(transfer: Transfer, rank: int) -> Transfer:
    end = End.RECV if transfer.end is End.SEND else End.SEND
    return Transfer(end, rank, transfer.edge, transfer.microbatch)


def _unpaired(ranks: Sequence[Sequence[Event]]) -> Iterator[str]:
    count = Counter((rank, e) for rank, row in enumerate(ranks) for e in row if isinstance(e, Transfer))
    for (rank, event), times in count.items():
        if times > 1:
            yield f"rank {rank} has `{event}` {times} times"
        elif not 0 <= event.peer < len(ranks) or event.peer == rank:
            yield f"rank {rank} has `{event}`, but {event.peer} is no other rank"
        elif not count[event.peer, _other_end(event, rank)]:
            yield f"rank {rank} has `{event}`, but rank {event.peer} has no other end of it"


def _out_of_place(ranks: Sequence[Sequence[Event]]) -> Iterator[str]:
    for rank, row in enumerate(ranks):
        position = {event: i for i, event in enumerate(row) if isinstance(event, Action)}
        for i, event in enumerate(row):
            if isinstance(event, Transfer):
                yield from _misplaced(rank, event, i, position)


def _misplaced(rank: int, event: Transfer, i: int, position: dict[Action, int]) -> Iterator[str]:
    """Report a send that precedes the action computing the value, or a receive that follows a use."""
    for action in _ends(event.edge, event.microbatch, event.end):
        if event.end is End.SEND and position.get(action, -1) > i:
            yield f"rank {rank} has `{event}` before {action}, which makes it"
        if event.end is End.RECV and position.get(action, i) < i:
            yield f"rank {rank} has `{event}` after {action}, which uses it"


def _ends(edge: Edge, microbatch: int | None, end: End) -> list[Action]:
    """Return the actions at one end of a transfer; none for a value of the step, which has no micro-batch."""
    if microbatch is None:
        return []
    stage = edge.source if end is End.SEND else edge.target
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT) if edge.backward else (Kind.FORWARD,)
    return [Action(stage, kind, microbatch) for kind in kinds]


def _where(ranks: Sequence[Sequence[Event]], rank: int, i: int) -> str:
    before = next((e for e in reversed(ranks[rank][:i]) if isinstance(e, Action)), None)
    after = next((e for e in ranks[rank][i:] if isinstance(e, Action)), None)
    place = " and ".join(
        [f"after {before}"] * (before is not None) + [f"before {after}"] * (after is not None)
    )
    return f"rank {rank}, {place}: waits in `{ranks[rank][i]}`"
