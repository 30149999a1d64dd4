"""GPipe: all forwards, then all backwards.

Four stages, four micro-batches (B takes two):

    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1: .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 2: .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 3: .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

The bubble of p ranks and m micro-batches is (p - 1) / (m + p - 1); a stage holds all m at once.
"""

from __future__ import annotations

from fxdp.pipeline.schedule.action import Action
from fxdp.pipeline.schedule.greedy import Board, play
from fxdp.pipeline.schedule.schedule import Schedule

NAME = "gpipe"


def gpipe(stages: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of Huang et al. (2019); with several stages per rank, breadth first."""

    def choice(rank: int, board: Board) -> Action | None:
        own = range(rank, stages, ranks)
        if any(board.forwards[stage] < microbatches for stage in own):
            return next(filter(None, map(board.forward, own)), None)
        return next(filter(None, map(board.backward, reversed(own))), None)

    return play(NAME, stages, ranks, microbatches, choice)
