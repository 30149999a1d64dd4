"""A pipeline schedule as a value: the actions of each rank in order. Nothing runs here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fxdp.errors import ScheduleError
from fxdp.pipeline.schedule.action import Action, Kind, backward, forward, input_gradient, weight_gradient
from fxdp.pipeline.schedule.timeline import Costs, Timeline, run

_LISTED = 16  # most faults shown: a file may have a million


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, checked to be complete and on the right rank.

    `placement[stage]` is the pp rank of a stage; `ranks[rank]` are a rank's actions in order. Each stage
    runs each micro-batch forward once, then backward once: as one B, or as I and later W. A schedule without
    any backward is for evaluation. Anything else raises `ScheduleError` with all faults. In rounds
    (`in_rounds.py`) an action is a share of that, and a round has those that it needs.

    `timeline` and `order` also check that ranks do not wait for one another in a cycle, and raise
    `DeadlockError` otherwise.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if faults := list(_faults(self)):
            shown = "\n".join(f"  {fault}" for fault in listed(faults))
            raise ScheduleError(
                f"schedule {self.name} of {self.stages} stages, {self.microbatches} micro-batches and "
                f"{len(self.ranks)} ranks is not complete:\n{shown}\n"
                "expected each stage on one rank, with one F and then one B (or I, then W) per micro-batch"
            )

    @property
    def in_rounds(self) -> bool:
        """True if micro-batches wait for one another between rounds."""
        return any(action.round is not None for row in self.ranks for action in row)

    @property
    def trains(self) -> bool:
        """True if the schedule has backwards."""
        return any(action.kind is not Kind.FORWARD for row in self.ranks for action in row)

    def forward_only(self) -> Schedule:
        """Return the schedule for evaluation, with only the forwards, in unchanged order."""
        rows = (tuple(a for a in row if a.kind is Kind.FORWARD) for row in self.ranks)
        return Schedule(self.name, self.stages, self.microbatches, self.placement, tuple(rows))

    def gradients_first(self, stages: Collection[int], *, holds_more: bool = False) -> Schedule:
        """Return the schedule with each B of these stages split into I and, right after, W.

        The input gradient can be sent between I and W, so that the receiving rank waits only for half of the
        backward; the order of work and the activations in memory do not change.

        With `holds_more` a rank's second-to-last W moves after the last I, so that the last input gradient
        is sent earlier: at the end, earlier ranks have nothing else to do. In 1F1B the last stage then holds
        part of two micro-batches for a while, as the first stage does, instead of one.

            F2 I2 W2 F3 I3 W3    ->    F2 I2 F3 I3 W2 W3
        """
        rows = []
        for row in self.ranks:
            split = [
                (input_gradient(a.stage, a.microbatch), weight_gradient(a.stage, a.microbatch))
                if a.kind is Kind.BACKWARD and a.stage in stages
                else (a,)
                for a in row
            ]
            halves = {action for pair in split if len(pair) > 1 for action in pair}
            actions = list(itertools.chain.from_iterable(split))
            rows.append(tuple(_last_gradient_earlier(actions, halves) if holds_more else actions))
        return replace(self, ranks=tuple(rows))

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """Return the start and end of each action; by default F, I and W take one unit each and B two."""
        return run(self.ranks, costs or Costs.uniform(self.stages))

    def order(self, costs: Costs | None = None) -> tuple[tuple[int, Action], ...]:
        """Return all actions with their ranks in one order, consistent with every rank and with the data."""
        return tuple((one.rank, one.action) for one in self.timeline(costs).intervals)

    def in_flight(self) -> tuple[int, ...]:
        """Return for each stage the largest number of micro-batches whose activations are held at once."""
        held, most = [0] * self.stages, [0] * self.stages
        for row in self.ranks:
            for action in row:
                held[action.stage] += {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0}.get(action.kind, -1)
                most[action.stage] = max(most[action.stage], held[action.stage])
        return tuple(most)


def _last_gradient_earlier(row: list[Action], halves: Collection[Action]) -> list[Action]:
    """Return the row with the second-to-last W of a split B moved after the last I of a split B."""
    kinds = [action.kind if action in halves else None for action in row]
    if kinds.count(Kind.INPUT_GRADIENT) < 2:
        return row
    last = len(row) - 1 - kinds[::-1].index(Kind.INPUT_GRADIENT)
    late = last - 1 - kinds[:last][::-1].index(Kind.WEIGHT_GRADIENT)
    return [*row[:late], *row[late + 1 : last + 1], row[late], *row[last + 1 :]]


def listed(faults: Sequence[str]) -> list[str]:
    """Return the first of many faults, and the number of the rest."""
    more = [f"and {len(faults) - _LISTED:,} more"] if len(faults) > _LISTED else []
    return [*faults[:_LISTED], *more]


def _faults(schedule: Schedule) -> Iterator[str]:
    if schedule.stages < 1 or schedule.microbatches < 1:
        yield "there must be at least one stage and one micro-batch"
    if len(schedule.placement) != schedule.stages:
        yield f"placement names {len(schedule.placement)} stages"
        return
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.stage >= schedule.stages or action.microbatch >= schedule.microbatches:
                yield f"{action} of rank {rank}: there is no such stage or micro-batch"
            elif (home := schedule.placement[action.stage]) != rank:
                yield f"{action} is on rank {rank}, but its stage is on rank {home}"
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < len(schedule.ranks):
            yield f"stage {stage} is on rank {rank}, which does not exist"
    yield from _faults_of_counts(schedule)
    yield from _faults_of_order(schedule)


def _faults_of_counts(schedule: Schedule) -> Iterator[str]:
    count = Counter(action for row in schedule.ranks for action in row)
    for action, times in count.items():
        if times > 1:
            yield f"{action} occurs {times} times"
    if schedule.in_rounds:
        return
    trains = schedule.trains  # which looks at all actions
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            yield from _faults_of_one(count, stage, microbatch, trains)


def _faults_of_one(count: Counter[Action], stage: int, microbatch: int, trains: bool) -> Iterator[str]:
    full, half = backward(stage, microbatch), input_gradient(stage, microbatch)
    rest = weight_gradient(stage, microbatch)
    if not count[forward(stage, microbatch)]:
        yield f"{forward(stage, microbatch)} is missing"
    if count[full] and (count[half] or count[rest]):
        yield f"{full} occurs beside {half if count[half] else rest}"
    elif count[half] and not count[rest]:
        yield f"{rest} is missing after {half}"
    elif count[rest] and not count[half]:
        yield f"{half} is missing before {rest}"
    elif trains and not count[full] and not count[half]:
        yield f"{full} is missing"


def _faults_of_order(schedule: Schedule) -> Iterator[str]:
    stages_of_kind = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 2}
    for row in schedule.ranks:
        latest: dict[tuple[int, int, int | None], Action] = {}
        for action in row:
            share = action.stage, action.microbatch, action.round
            before = latest.get(share, action)
            if stages_of_kind[before.kind] > stages_of_kind[action.kind]:
                yield f"{before} comes before {action}"
            latest[share] = action
