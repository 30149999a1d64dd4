"""A program after the cut: parts, and the values that pass between parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import Location, meta, tensor_type
from fxdp.ir.graph.signature import OutputSpec, Parameter, StageValue
from fxdp.ir.types.placements import Partial, Placement
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.schedule.in_rounds import in_rounds
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.transfers import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class CutEdge(Edge):
    """A value that passes between stages, under the name of the program's node."""

    type: TensorType
    placement: Placement
    location: Location
    skip: str = ""
    """The skip connections for which the value is sent, by name."""


@dataclass(frozen=True)
class Total:
    """A value of one stage's micro-batches that is joined or summed once per step."""

    name: str
    stage: int
    backward: bool
    type: TensorType
    placement: Placement


@dataclass
class Part:
    """One part of a program: a joint graph with values of other parts among the inputs and results."""

    gm: fx.GraphModule
    reads: tuple[StageValue, ...]
    """Values received from other parts."""
    gives: tuple[str, ...]
    """Names of the results, in order, which other parts or the step's results read."""
    summed: frozenset[str] = frozenset()
    """Results that the backward adds to buffers of the step instead of returning."""

    @property
    def parameters(self) -> dict[Parameter, TensorType]:
        """The parameters that the part reads, with their types."""
        return {spec: tensor_type(node) for spec, node in inputs_of(self.gm.graph, Parameter)}


@dataclass(frozen=True)
class StagePart:
    """A part of a round, with the stage whose rank runs it; None for every rank.

    Attributes
    ----------
    name : what the written step calls it, as `round 3` or `exchange 1`.
    backward : True if gradients leave it, which travel to earlier stages.
    kinds : what a block computes in it, forward or backward or both.
    """

    name: str
    stage: int | None
    part: Part
    backward: bool = False
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True)
class BlockRound:
    """What each block computes before values of all blocks are summed or gathered, and what that gives.

    Attributes
    ----------
    blocks : the parts of one block, in order; none if the other parts need no values of blocks.
    exchange : the collectives, and ops on full values, which run once.
    """

    blocks: tuple[StagePart, ...]
    exchange: tuple[StagePart, ...]


@dataclass
class Partition:
    """A program in parts. Together the parts compute the entire program."""

    stages: int
    prologue: Part | None
    parts: tuple[Part, ...]
    """Forward and backward of one micro-batch, per stage."""
    epilogues: tuple[Part | None, ...]
    """Ops that run once per step after the last micro-batch, per stage."""
    edges: tuple[CutEdge, ...]
    totals: dict[str, Total]
    """Values of micro-batches that epilogues or results read, by name."""
    results: tuple[tuple[OutputSpec, str, int], ...]
    """The program's results: spec, name of the value, stage that computes the value."""
    gathers: tuple[Part | None, ...] = ()
    """The all-gathers of the stage's sharded parameters, before the first micro-batch, per stage."""
    rounds: tuple[BlockRound, ...] = ()
    """With blocks, what runs in rounds, before `parts`."""
    coupled: bool = False
    """True if rounds run all blocks, because these wait for one another: `parts` are for plans alone."""

    @property
    def everything(self) -> tuple[Part, ...]:
        """All parts, in no particular order."""
        rounds = [one.part for one in self.in_rounds]
        every = (self.prologue, *rounds, *self.gathers, *self.parts, *self.epilogues)
        return tuple(part for part in every if part is not None)

    @property
    def in_rounds(self) -> tuple[StagePart, ...]:
        """The parts of all rounds, in the order in which they run."""
        return tuple(part for one in self.rounds for part in (*one.blocks, *one.exchange))

    def rounds_schedule(self, placement: Sequence[int], blocks: int) -> Schedule:
        """Return the order of blocks that wait for one another."""
        turns = ([(s.stage, s.kinds) for s in one.blocks if s.stage is not None] for one in self.rounds)
        return in_rounds([*turns], placement, blocks)

    def readers(self, placement: Sequence[int]) -> dict[Parameter, set[int]]:
        """Return the ranks that read each parameter, given the rank of each stage in `placement`."""
        found: dict[Parameter, set[int]] = {}
        for parts in (self.parts, self.gathers, self.epilogues):
            for part, rank in zip(parts, placement, strict=False):
                for spec in part.parameters if part is not None else ():
                    found.setdefault(spec, set()).add(rank)
        for one in self.in_rounds:
            if one.stage is not None:
                for spec in one.part.parameters:
                    found.setdefault(spec, set()).add(placement[one.stage])
        return found

    def with_sums(self) -> Partition:
        """Return the partition for several micro-batches: values that are only summed go to buffers."""
        urgent = {e.name for e in self.edges}
        found: dict[int, set[str]] = {}
        for name, total in self.totals.items():
            if total.backward and total.placement == Partial("sum") and name not in urgent:
                found.setdefault(total.stage, set()).add(name)
        parts = [replace(p, summed=frozenset(found.get(s, ()))) for s, p in enumerate(self.parts)]
        return replace(self, parts=tuple(parts))


def forward_gives(part: Part) -> list[str]:
    """Return the names of the forward's results, in order."""
    return [s.name for s in _specs(part) if isinstance(s, StageValue) and not s.backward]


def backward_gives(part: Part) -> list[str]:
    """Return the names of the backward's results, in order."""
    return [s.name for s in _specs(part) if isinstance(s, StageValue) and s.backward]


def summed(part: Part) -> tuple[int, ...]:
    """Return the indices of the backward's results that are added to buffers."""
    return tuple(i for i, name in enumerate(backward_gives(part)) if name in part.summed)


def backward_parts(partition: Partition, stage: int) -> tuple[list[str], list[str]]:
    """Return the results of a stage's backward that earlier stages await, and the remaining ones."""
    urgent = {e.name for e in partition.edges if e.source == stage and e.backward}
    gives = backward_gives(partition.parts[stage])
    return [g for g in gives if g in urgent], [g for g in gives if g not in urgent]


def _specs(part: Part) -> tuple[Any, ...]:
    return meta(part.gm.graph.output_node()).results
