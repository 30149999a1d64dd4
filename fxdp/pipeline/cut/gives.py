"""The names of what the parts of a stage give, in the order of their results."""

from __future__ import annotations

from typing import Any

from fxdp.ir.notes import note
from fxdp.ir.slots import Crossing
from fxdp.pipeline.cut import Part, Partition


def forward_gives(part: Part) -> list[str]:
    """The names of what a part's forward gives, in its order."""
    return [s.name for s in _slots(part) if isinstance(s, Crossing) and not s.backward]


def backward_gives(part: Part) -> list[str]:
    """The names of what a part's backward gives, in its order."""
    return [s.name for s in _slots(part) if isinstance(s, Crossing) and s.backward]


def summed(part: Part) -> tuple[int, ...]:
    """The numbers of the backward's results that it adds to buffers."""
    return tuple(i for i, name in enumerate(backward_gives(part)) if name in part.summed)


def halves_of(partition: Partition, stage: int) -> tuple[list[str], list[str]]:
    """What a stage's backward gives: what other stages wait for, and the rest."""
    urgent = {e.name for e in partition.edges if e.source == stage and e.backward}
    gives = backward_gives(partition.parts[stage])
    return [g for g in gives if g in urgent], [g for g in gives if g not in urgent]


def _slots(part: Part) -> tuple[Any, ...]:
    return note(part.gm.graph.output_node()).results
