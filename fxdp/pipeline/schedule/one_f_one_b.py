"""1F1B: run each backward as soon as possible, so that few micro-batches are in flight.

Four stages, four micro-batches (B takes two):
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1: .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 2: .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    rank 3: .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

The bubble is as in GPipe, (p - 1) / (m + p - 1), but stage s of S holds at most S - s micro-batches.
"""

from __future__ import annotations

from fxdp.pipeline.schedule.action import Action
from fxdp.pipeline.schedule.greedy import Board, play
from fxdp.pipeline.schedule.schedule import Schedule

NAME = "1f1b"


def one_f_one_b(stages: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of PipeDream-Flush (Narayanan et al., 2021); later stages of a rank go first."""

    def choice(rank: int, board: Board) -> Action | None:
        own = range(rank, stages, ranks)[::-1]
        for stage in own:
            in_flight = board.forwards[stage] - board.backwards[stage]
            if in_flight < stages - stage and (action := board.forward(stage)):
                return action
        return min(filter(None, map(board.backward, own)), key=lambda action: action.microbatch, default=None)

    return play(NAME, stages, ranks, microbatches, choice)
