"""Rounds: micro-batches wait for one another in the midst of the model, with sums over all of them there.

Two stages with a sum in the midst of the first one (B takes two):

    rank 0: F0r0 F1r0 F0r1 F1r1 .    .    .    .    .    B0r2 B0r2 B1r2 B1r2 B0r3 B0r3 B1r3 B1r3
    rank 1: .    .    .    F0r1 B0r1 B0r1 F1r1 B1r1 B1r1

A round begins when all micro-batches have ended the one before, on all ranks. Within a round the forwards go
through the stages, and the backwards back, as far as the round needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.schedule import Schedule


def in_rounds(
    rounds: Sequence[Sequence[tuple[int, Sequence[Kind]]]], placement: Sequence[int], microbatches: int
) -> Schedule:
    """Return the schedule of rounds, each given as stages in order with what they compute."""
    rows: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    for number, turns in enumerate(rounds):
        for stage, kinds in turns:
            every = ((index, kind) for index in range(microbatches) for kind in kinds)
            rows[placement[stage]] += [Action(stage, kind, index, number) for index, kind in every]
    return Schedule("rounds", len(placement), microbatches, tuple(placement), tuple(map(tuple, rows)))
