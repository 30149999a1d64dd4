"""Insert the transfers of a schedule into the ranks' programs, in an order that cannot deadlock.

The rule: walk all actions in one global order; right after each action, append for every edge that leaves
this action the `send` to the producer's program and the `recv` to the consumer's.

    order   rank 0           rank 1           rank 2
    0F0     0F0
            send x to 1      recv x from 0
            send skip to 2                    recv skip from 0
    1F0                      1F0
                             send y to 2      recv y from 1
    2F0                                       2F0

Every program is then a projection of one total order of events: both ends of the first unfinished transfer
are the next events of their programs, so even unbuffered, blocking transfers always continue, for any edges.
The runtime starts a receive at this point, and waits for the value at the first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxdp.pipeline.schedule.action import Action, Kind, StrEnum
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs


@dataclass(frozen=True, order=True, slots=True)
class Edge:
    """A value that one stage computes and another stage uses.

    A forward edge leaves a forward and goes to a later stage, a backward edge leaves a backward (B or I) and
    goes to an earlier one. With `once` the value belongs to the step, not to a micro-batch: a forward edge
    then leaves the stage's first forward (a value computed from parameters only), a backward edge the
    stage's last action (an accumulated gradient).
    """

    name: str
    source: int
    target: int
    backward: bool = False
    once: bool = False

    def __str__(self) -> str:
        return self.name


class End(StrEnum):
    """The end of a transfer that a program has."""

    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, order=True, slots=True)
class Transfer:
    """One end of a transfer between two ranks: an edge's value of one micro-batch (None: of the step)."""

    end: End
    peer: int
    edge: Edge
    microbatch: int | None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f" mb{self.microbatch}"
        return f"{self.end} {self.edge}{microbatch} {'to' if self.end is End.SEND else 'from'} {self.peer}"


Event: TypeAlias = Action | Transfer
_Programs: TypeAlias = tuple[tuple[Event, ...], ...]


def programs(schedule: Schedule, edges: Sequence[Edge], costs: Costs | None = None) -> _Programs:
    """Return each rank's actions and transfers in order; edges within one rank need no transfer.

    Raises
    ------
    DeadlockError : the schedule's own order has a cycle.
    """
    rows: list[list[Event]] = [[] for _ in schedule.ranks]
    leaving = _leaving(schedule, edges)
    for rank, action in schedule.order(costs):
        rows[rank].append(action)
        for edge in leaving.get(action, ()):
            peer = schedule.placement[edge.target]
            microbatch = None if edge.once else action.microbatch
            rows[rank].append(Transfer(End.SEND, peer, edge, microbatch))
            rows[peer].append(Transfer(End.RECV, rank, edge, microbatch))
    return tuple(tuple(row) for row in rows)


def _leaving(schedule: Schedule, edges: Sequence[Edge]) -> dict[Action, list[Edge]]:
    """Return the edges that need a transfer after each action, in the order given."""
    found: dict[Action, list[Edge]] = {}
    for edge in edges:
        if schedule.placement[edge.source] == schedule.placement[edge.target]:
            continue
        row = [a for a in schedule.ranks[schedule.placement[edge.source]] if a.stage == edge.source]
        if edge.backward:
            after = [a for a in row if a.gives_gradient]
            after = row[-1:] if edge.once and after else after
        else:
            after = [a for a in row if a.kind is Kind.FORWARD]
            after = after[:1] if edge.once else after
        for action in after:
            found.setdefault(action, []).append(edge)
    return found
