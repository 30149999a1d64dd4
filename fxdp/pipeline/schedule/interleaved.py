"""Interleaved 1F1B: several stages per rank, used in turn, so that the pipeline fills sooner.

Two ranks with stages 0, 2 and 1, 3; four micro-batches (here B takes as long as F):
    rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1: .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Forwards run in rounds of about as many micro-batches as there are ranks: a full round on the rank's first
stage, then on the second, ...; backwards likewise, from the rank's last stage. With p ranks, v stages each
and m >= p micro-batches the bubble is (p - 1) / (v m + p - 1): v times less idle time than in 1F1B.
"""

from __future__ import annotations

from fxdp.pipeline.schedule.action import Action
from fxdp.pipeline.schedule.greedy import Board, play
from fxdp.pipeline.schedule.schedule import Schedule

NAME = "interleaved"


def interleaved(stages: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of Narayanan et al. (2021), for any number of stages and micro-batches.

    If the number of micro-batches is no multiple of `ranks`, the first rounds are longer by one; no round is
    shorter than `ranks`. Forwards may be ahead of backwards by Megatron's limit: the first backward is ready
    exactly when the limit is reached. A rank whose next forward has no input yet takes a ready backward
    instead.
    """
    rounds = _rounds(microbatches, ranks)
    own = [range(rank, stages, ranks) for rank in range(ranks)]
    forwards = [[stage for n in rounds for stage in mine for _ in range(n)] for mine in own]
    backwards = [[stage for n in rounds for stage in reversed(mine) for _ in range(n)] for mine in own]

    def limit(rank: int) -> int:
        return (len(own[rank]) - 1) * rounds[0] + 2 * (stages - 1 - own[rank][-1]) + 1

    def ahead(rank: int, board: Board) -> Action | None:
        done = sum(board.forwards[stage] for stage in own[rank])
        return board.forward(forwards[rank][done]) if done < len(forwards[rank]) else None

    def choice(rank: int, board: Board) -> Action | None:
        done = sum(board.backwards[stage] for stage in own[rank])
        in_flight = sum(board.forwards[stage] for stage in own[rank]) - done
        if in_flight < limit(rank) and (action := ahead(rank, board)):
            return action
        return board.backward(backwards[rank][done]) if done < len(backwards[rank]) else None

    return play(NAME, stages, ranks, microbatches, choice)


def _rounds(microbatches: int, ranks: int) -> list[int]:
    """Return the sizes of `max(1, m // p)` rounds, descending, with a difference of at most one."""
    count = max(1, microbatches // ranks)
    short, longer = divmod(microbatches, count)
    return [short + 1] * longer + [short] * (count - longer)
