"""Zero bubble: compute input gradients first, which earlier stages await, and weight gradients in the gaps.

Four stages, four micro-batches (F, I and W take one each):
    rank 0: F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1: .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

With p ranks, m >= p micro-batches and equal F, I and W the bubble is (p - 1) / (3 m + p - 1): a third of
1F1B's idle time, as in ZB-H1. No stage holds more activations than the first stage in 1F1B; this limits the
number of postponed Ws.
"""

from __future__ import annotations

from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.greedy import Board, play
from fxdp.pipeline.schedule.schedule import Schedule

NAME = "zero-bubble"


def zero_bubble(stages: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule ZB-H1 of Qi et al. (2023), by simulation; later stages of a rank go first."""

    def choice(rank: int, board: Board) -> Action | None:
        own = range(rank, stages, ranks)[::-1]
        for stage in own:
            in_flight = board.forwards[stage] - board.backwards[stage]
            held = board.forwards[stage] - board.weights[stage]
            if in_flight < stages - stage and held < stages and (action := board.forward(stage)):
                return action
        ready = [action for stage in own if (action := board.backward(stage, Kind.INPUT_GRADIENT))]
        waiting = [action for stage in own if (action := board.weight_gradient(stage))]
        return min(ready or waiting, key=lambda action: action.microbatch, default=None)

    return play(NAME, stages, ranks, microbatches, choice, splits=True)
