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
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    weights: tuple[int, ...]

    def can_forward(self, stage: int) -> bool:
        """Whether the stage's next forward has its input."""
        available = self.forwards[stage - 1] if stage else self.microbatches
        return self.forwards[stage] < available

    def can_backward(self, stage: int) -> bool:
        """Whether the stage's next backward has its activations and its gradient."""
        available = self.backwards[stage + 1] if stage + 1 < self.stages else self.microbatches
        return self.backwards[stage] < min(available, self.forwards[stage])

    def can_weight(self, stage: int) -> bool:
        """Whether a backward of the stage has left its weight gradient to do."""
        return self.weights[stage] < self.backwards[stage]

    def forward(self, stage: int) -> Action:
        """The stage's next forward."""
        return Action(stage, Kind.FORWARD, self.forwards[stage])

    def backward(self, stage: int) -> Action:
        """The stage's next whole backward."""
        return Action(stage, Kind.BACKWARD, self.backwards[stage])

    def input_gradient(self, stage: int) -> Action:
        """The stage's next backward, without its weights."""
        return Action(stage, Kind.INPUT_GRADIENT, self.backwards[stage])

    def weight_gradient(self, stage: int) -> Action:
        """The stage's next weight gradient."""
        return Action(stage, Kind.WEIGHT_GRADIENT, self.weights[stage])


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
    name: str,
    stages: int,
    ranks: int,
    microbatches: int,
    choice: Choice,
    *,
    splits: bool = False,
) -> Schedule:
    """The schedule that comes of all ranks' choices; `splits` says that backwards are I and W.

    In each tick some rank must find a choice: a schedule's limits must leave the first unfinished
    micro-batch a way on.
    """
    placement = round_robin(stages, ranks)
    if microbatches < 1:
        raise ScheduleError(f"schedule {name} got {microbatches} micro-batches: expected at least one")
    board = Board(stages, microbatches, (0,) * stages, (0,) * stages, (0,) * stages)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while min(board.weights if splits else board.backwards) < microbatches:
        taken = [(rank, choice(rank, board)) for rank in range(ranks)]
        moves = [(rank, action) for rank, action in taken if action]
        assert moves, f"schedule {name} is stuck at {board}"
        for rank, action in moves:
            rows[rank].append(action)
        board = _after(board, [action for _, action in moves])
    return Schedule(name, stages, microbatches, placement, tuple(map(tuple, rows)))


def _after(board: Board, actions: list[Action]) -> Board:
    counts = {
        Kind.FORWARD: list(board.forwards),
        Kind.INPUT_GRADIENT: list(board.backwards),
        Kind.WEIGHT_GRADIENT: list(board.weights),
    }
    counts[Kind.BACKWARD] = counts[Kind.INPUT_GRADIENT]
    for action in actions:
        counts[action.kind][action.stage] += 1
    return Board(
        board.stages,
        board.microbatches,
        tuple(counts[Kind.FORWARD]),
        tuple(counts[Kind.BACKWARD]),
        tuple(counts[Kind.WEIGHT_GRADIENT]),
    )
