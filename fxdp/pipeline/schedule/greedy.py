"""Make a schedule by playing it: in each tick every rank takes at most one action that is ready.

What a schedule prefers is a `Choice`: a function from what is done (`Board`) to the rank's next action, or
None to wait. Each stage takes its micro-batches in order, so that three counters per stage tell all.
Every action takes one tick, whatever its kind. The outcome is an order for each rank, not a time table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fxdp.errors import ScheduleError
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.schedule import Schedule


@dataclass(frozen=True)
class Board:
    """How many micro-batches each stage has finished at the beginning of a tick.

    `backwards` counts B or I, `weights` counts W (with B it stays 0).
    """

    stages: int
    microbatches: int
    forwards: list[int]
    backwards: list[int]
    weights: list[int]

    def forward(self, stage: int) -> Action | None:
        """The stage's next forward, if it has its input."""
        available = self.forwards[stage - 1] if stage else self.microbatches
        return self._next(Kind.FORWARD, stage, self.forwards, available)

    def backward(self, stage: int, kind: Kind = Kind.BACKWARD) -> Action | None:
        """The stage's next backward or first half of one, if it has its activations and its gradient."""
        available = self.backwards[stage + 1] if stage + 1 < self.stages else self.microbatches
        return self._next(kind, stage, self.backwards, min(available, self.forwards[stage]))

    def weight_gradient(self, stage: int) -> Action | None:
        """The stage's next weight gradient, if a backward has left one to do."""
        return self._next(Kind.WEIGHT_GRADIENT, stage, self.weights, self.backwards[stage])

    def _next(self, kind: Kind, stage: int, done: list[int], available: int) -> Action | None:
        return Action(stage, kind, done[stage]) if done[stage] < available else None

    def count(self, action: Action) -> None:
        """The action is done."""
        done = {Kind.FORWARD: self.forwards, Kind.WEIGHT_GRADIENT: self.weights}.get(action.kind)
        (self.backwards if done is None else done)[action.stage] += 1


Choice: TypeAlias = Callable[[int, Board], Action | None]
"""`choice(rank, board)`: the rank's action in this tick; it must be ready."""


def round_robin(stages: int, ranks: int) -> tuple[int, ...]:
    """Stage `s` on rank `s % ranks`; `ScheduleError` if a rank would have no stage."""
    if not 1 <= ranks <= stages:
        raise ScheduleError(
            f"{stages} stages cannot be laid out over {ranks} ranks: expected at least one stage per rank; "
            "take more stages or fewer ranks"
        )
    return tuple(stage % ranks for stage in range(stages))


def play(
    name: str, stages: int, ranks: int, microbatches: int, choice: Choice, *, splits: bool = False
) -> Schedule:
    """The schedule that comes of all ranks' choices; `splits` says that backwards are I and W.

    In each tick some rank must find a choice: a schedule's limits must leave the first unfinished
    micro-batch a way on.
    """
    placement = round_robin(stages, ranks)
    if microbatches < 1:
        raise ScheduleError(f"schedule {name} got {microbatches} micro-batches: expected at least one")
    board = Board(stages, microbatches, [0] * stages, [0] * stages, [0] * stages)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while min(board.weights if splits else board.backwards) < microbatches:
        taken = [(rank, choice(rank, board)) for rank in range(ranks)]
        moves = [(rank, action) for rank, action in taken if action]
        assert moves, f"schedule {name} is stuck at {board}"
        for rank, action in moves:
            rows[rank].append(action)
            board.count(action)
    return Schedule(name, stages, microbatches, placement, tuple(map(tuple, rows)))
