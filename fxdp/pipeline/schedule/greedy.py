"""Make a schedule by simulation: in each tick every rank takes at most one action that is ready.

A schedule's preference is a `_Choice`: a function from the progress so far (`Board`) to the rank's next
action, or to None to wait. Each stage takes micro-batches in order, so three counters per stage describe all
progress. Every action takes one tick, regardless of kind. The result is an order for each rank, not a
timetable.
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
    """Number of micro-batches that each stage has finished at the beginning of a tick.

    `backwards` counts B or I; `weights` counts W, and stays 0 with B.
    """

    stages: int
    microbatches: int
    forwards: list[int]
    backwards: list[int]
    weights: list[int]

    def forward(self, stage: int) -> Action | None:
        """Return the stage's next forward, if the input is available."""
        available = self.forwards[stage - 1] if stage else self.microbatches
        return self._next(Kind.FORWARD, stage, self.forwards, available)

    def backward(self, stage: int, kind: Kind = Kind.BACKWARD) -> Action | None:
        """Return the stage's next backward (B or I), if activations and output gradient are available."""
        available = self.backwards[stage + 1] if stage + 1 < self.stages else self.microbatches
        return self._next(kind, stage, self.backwards, min(available, self.forwards[stage]))

    def weight_gradient(self, stage: int) -> Action | None:
        """Return the stage's next weight gradient, if an input gradient has been computed before."""
        return self._next(Kind.WEIGHT_GRADIENT, stage, self.weights, self.backwards[stage])

    def _next(self, kind: Kind, stage: int, done: list[int], available: int) -> Action | None:
        return Action(stage, kind, done[stage]) if done[stage] < available else None

    def count(self, action: Action) -> None:
        """Record an action as done."""
        done = {Kind.FORWARD: self.forwards, Kind.WEIGHT_GRADIENT: self.weights}.get(action.kind)
        (self.backwards if done is None else done)[action.stage] += 1


_Choice: TypeAlias = Callable[[int, Board], Action | None]
"""`choice(rank, board)` returns the rank's action in this tick, which must be ready, or None."""


def _round_robin(stages: int, ranks: int) -> tuple[int, ...]:
    """Place stage `s` on rank `s % ranks`; raise `ScheduleError` if a rank would have no stage."""
    if not 1 <= ranks <= stages:
        raise ScheduleError(
            f"{stages} stages cannot be laid out over {ranks} ranks: expected at least one stage per rank; "
            "take more stages or fewer ranks"
        )
    return tuple(stage % ranks for stage in range(stages))


def play(
    name: str, stages: int, ranks: int, microbatches: int, choice: _Choice, *, splits: bool = False
) -> Schedule:
    """Return the schedule that results from all ranks' choices; with `splits` backwards are I and W.

    In each tick at least one rank must choose an action: a schedule's limits must never block the first
    unfinished micro-batch.
    """
    placement = _round_robin(stages, ranks)
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
