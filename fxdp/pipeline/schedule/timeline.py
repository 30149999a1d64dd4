"""Compute when each action of a schedule runs, if a rank waits only for data and for the previous action.

    0F0 needs nothing              0B0 and 0I0 need 0F0 and the gradient of stage 1 (1B0 or 1I0)
    1F0 needs 0F0                  0W0 needs 0I0

The chain over neighboring stages covers every edge: a skip from stage 0 to 3 is implied by 0F 1F 2F 3F.
Transfers are assumed to take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import networkx

from fxdp.errors import DeadlockError
from fxdp.pipeline.schedule.action import Action, Kind, forward


@dataclass(frozen=True, slots=True)
class Costs:
    """Duration of each stage for one micro-batch, in any one unit; a full backward takes I + W."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]

    @staticmethod
    def uniform(
        stages: int, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
    ) -> Costs:
        """Return equal costs for all stages; by default a backward takes twice as long as a forward."""
        return Costs((forward,) * stages, (input_gradient,) * stages, (weight_gradient,) * stages)

    def of(self, action: Action) -> float:
        """Return the duration of one action."""
        stage = action.stage
        match action.kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.BACKWARD:
                return self.input_gradient[stage] + self.weight_gradient[stage]
            case Kind.INPUT_GRADIENT:
                return self.input_gradient[stage]
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient[stage]


@dataclass(frozen=True, slots=True)
class Interval:
    """An action with start and finish; `depth` is the length of the longest chain of earlier actions."""

    rank: int
    action: Action
    start: float
    finish: float
    depth: int


@dataclass(frozen=True)
class Timeline:
    """All actions with their times, in the one order that every rank follows: by finish, depth, then rank."""

    intervals: tuple[Interval, ...]
    ranks: int

    @cached_property
    def span(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max((interval.finish for interval in self.intervals), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Idle share of all ranks' time: 0 is a full pipeline."""
        busy = sum(interval.finish - interval.start for interval in self.intervals)
        return 1.0 - busy / (self.ranks * self.span) if self.span else 0.0

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """Return the actions of one rank, in order."""
        return tuple(interval for interval in self.intervals if interval.rank == rank)


def _needs(action: Action, backwards: Mapping[tuple[int, int], Action]) -> tuple[Action, ...]:
    """Return the actions that must be finished before an action can start.

    `backwards[stage, microbatch]` is the action that computes the stage's input gradient: B or I.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (forward(stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return (backwards[stage, microbatch],)
    after = backwards.get((stage + 1, microbatch))
    return (forward(stage, microbatch), *([after] if after else []))


def _needs_in_rounds(ranks: Sequence[Sequence[Action]]) -> dict[Action, tuple[Action, ...]]:
    """Return what each action needs: its micro-batch's turn before it, and first all of the last round."""
    rounds: dict[int, dict[int, list[Action]]] = {}
    for action in (action for row in ranks for action in row):
        rounds.setdefault(action.round or 0, {}).setdefault(action.microbatch, []).append(action)
    found: dict[Action, tuple[Action, ...]] = {}
    before: tuple[Action, ...] = ()
    for _, turns in sorted(rounds.items()):
        for actions in turns.values():
            actions.sort(key=lambda a: (a.gives_gradient, -a.stage if a.gives_gradient else a.stage))
            found[actions[0]] = before
            found |= {later: (earlier,) for earlier, later in pairwise(actions)}
        before = tuple(actions[-1] for actions in turns.values())
    return found


def _needs_of(ranks: Sequence[Sequence[Action]]) -> Callable[[Action], tuple[Action, ...]]:
    """Return the function that says which actions must be finished before another can start."""
    if any(action.round is not None for row in ranks for action in row):
        return _needs_in_rounds(ranks).__getitem__
    backwards = {(a.stage, a.microbatch): a for row in ranks for a in row if a.gives_gradient}
    return partial(_needs, backwards=backwards)


def run(ranks: Sequence[Sequence[Action]], costs: Costs) -> Timeline:
    """Simulate the clock; raise `DeadlockError` with the cycle if ranks wait for one another forever."""
    needs = _needs_of(ranks)
    done: dict[Action, Interval] = {}
    heads, last = [0] * len(ranks), [(0.0, 0)] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(ranks):
            while heads[rank] < len(row):
                action = row[heads[rank]]
                needed = needs(action)
                if any(n not in done for n in needed):
                    break
                before = [last[rank], *((done[n].finish, done[n].depth) for n in needed)]
                start, depth = max(finish for finish, _ in before), 1 + max(depth for _, depth in before)
                interval = done[action] = Interval(rank, action, start, start + costs.of(action), depth)
                heads[rank], last[rank], moved = heads[rank] + 1, (interval.finish, depth), True
    _refuse_stuck(ranks, heads, done, needs)
    intervals = sorted(done.values(), key=lambda interval: (interval.finish, interval.depth, interval.rank))
    return Timeline(tuple(intervals), len(ranks))


def _refuse_stuck(
    ranks: Sequence[Sequence[Action]],
    heads: Sequence[int],
    done: Mapping[Action, Interval],
    needs: Callable[[Action], tuple[Action, ...]],
) -> None:
    home = {action: rank for rank, row in enumerate(ranks) for action in row}
    waits = networkx.DiGraph()
    for rank, row in enumerate(ranks):
        if heads[rank] < len(row):
            missing = next(n for n in needs(row[heads[rank]]) if n not in done)
            waits.add_edge(rank, home[missing], missing=missing)
    if not waits:
        return
    lines = [
        f"  rank {rank} is at {ranks[rank][heads[rank]]}, which needs {waits.edges[rank, other]['missing']} "
        f"of rank {other}"
        for rank, other in networkx.find_cycle(waits)
    ]
    raise DeadlockError(
        "the order of actions goes round in a circle:\n" + "\n".join(lines) + "\n"
        "expected an order in which some rank can always go on: move one of them behind what it needs"
    )
