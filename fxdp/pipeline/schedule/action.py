"""One unit of a rank's work: a stage runs forward or backward on one micro-batch.

Actions are written as in torch: `0F2` is the forward of stage 0 on micro-batch 2, `1B0` a full backward,
which zero-bubble schedules split into `1I0` (gradient of the inputs) and `1W0` (gradient of the weights).
`0F2r5` is the share of round 5 in it, where micro-batches wait for one another between rounds.
"""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass

from fxdp.errors import ScheduleError

__all__ = ["StrEnum"]

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:

    class StrEnum(str, enum.Enum):
        """Members that are texts."""

        __str__ = str.__str__

        def __format__(self, specification: str) -> str:
            """Return the text in this format."""
            return format(self.value, specification)


class Kind(StrEnum):
    """The kind of computation in a stage; the values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


_WORD = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})(?:r([0-9]{1,9}))?")  # digits as torch writes them
_SHOWN = 40


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """Run the computation `kind` of `stage` on `microbatch`, or its share of a round; all count from 0."""

    stage: int
    kind: Kind
    microbatch: int
    round: int | None = None

    def __str__(self) -> str:
        share = "" if self.round is None else f"r{self.round}"
        return f"{self.stage}{self.kind}{self.microbatch}{share}"

    @staticmethod
    def parse(word: str) -> Action:
        """Return the action of a word like `0F2`; raise `ScheduleError` for anything else."""
        found = _WORD.fullmatch(word.strip())
        if found is None:
            raise ScheduleError(
                f"`{word[:_SHOWN]}` is no action: expected stage, one of F, B, I, W, and micro-batch, such "
                "as `0F2`"
            )
        return Action(int(found[1]), Kind(found[2]), int(found[3]), int(found[4]) if found[4] else None)

    @property
    def gives_gradient(self) -> bool:
        """True if the action computes the stage's input gradient: a backward, or only its first half."""
        return self.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)


def forward(stage: int, microbatch: int) -> Action:
    """Return the forward of a stage, as in `0F2`."""
    return Action(stage, Kind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Return the full backward of a stage, as in `0B2`."""
    return Action(stage, Kind.BACKWARD, microbatch)


def input_gradient(stage: int, microbatch: int) -> Action:
    """Return the input-gradient half of a backward, as in `0I2`."""
    return Action(stage, Kind.INPUT_GRADIENT, microbatch)


def weight_gradient(stage: int, microbatch: int) -> Action:
    """Return the weight-gradient half of a backward, as in `0W2`."""
    return Action(stage, Kind.WEIGHT_GRADIENT, microbatch)
