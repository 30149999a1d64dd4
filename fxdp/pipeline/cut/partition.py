"""What a program is after it is cut: parts, and what they hand to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxdp.ir.graphs import inputs_of
from fxdp.ir.metadata import Location, meta, tensor_type
from fxdp.ir.placements import Partial, Placement
from fxdp.ir.signature import OutputSpec, Parameter, StageValue
from fxdp.ir.types import TensorType
from fxdp.pipeline.schedule.transfers import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class CutEdge(Edge):
    """A value that stages hand on, by the name of its node in the entire program, and what it is there."""

    type: TensorType
    placement: Placement
    location: Location
    skip: str = ""
    """The skip connections that it carries, by name."""


@dataclass(frozen=True)
class Total:
    """A value of the micro-batches of one stage that is put together once per step."""

    name: str
    stage: int
    backward: bool
    type: TensorType
    placement: Placement


@dataclass
class Part:
    """One part of a program: a joint graph whose slots say what comes from other parts and goes there."""

    gm: fx.GraphModule
    reads: tuple[StageValue, ...]
    """What comes from other parts."""
    gives: tuple[str, ...]
    """The names of its results, which other parts or the step's results read, in their order."""
    summed: frozenset[str] = frozenset()
    """Those among them that its backward adds to buffers of the step instead of giving them."""

    @property
    def parameters(self) -> dict[Parameter, TensorType]:
        """The parameters that it reads."""
        return {spec: tensor_type(node) for spec, node in inputs_of(self.gm.graph, Parameter)}


@dataclass
class Partition:
    """A program in parts. The union of the parts is the program."""

    stages: int
    prologue: Part | None
    parts: tuple[Part, ...]
    """Per stage, forward and backward of one micro-batch."""
    epilogues: tuple[Part | None, ...]
    """Per stage, what runs once per step after its last micro-batch."""
    edges: tuple[CutEdge, ...]
    totals: dict[str, Total]
    """Values of micro-batches that epilogues or results read, by name."""
    results: tuple[tuple[OutputSpec, str, int], ...]
    """The program's results: slot, name of the value, stage that has it."""
    gathers: tuple[Part | None, ...] = ()
    """Per stage, what gathers the sharded parameters that it reads, before the first micro-batch."""

    def readers(self, placement: Sequence[int]) -> dict[Parameter, set[int]]:
        """The ranks whose stages read each parameter, several of a tied one; a rank per stage is given."""
        found: dict[Parameter, set[int]] = {}
        for parts in (self.parts, self.gathers, self.epilogues):
            for part, rank in zip(parts, placement, strict=False):
                for spec in part.parameters if part is not None else ():
                    found.setdefault(spec, set()).add(rank)
        return found

    def with_sums(self) -> Partition:
        """The same for several micro-batches: what is only summed up goes into buffers of the step."""
        urgent = {e.name for e in self.edges}
        found: dict[int, set[str]] = {}
        for name, total in self.totals.items():
            if total.backward and total.placement == Partial("sum") and name not in urgent:
                found.setdefault(total.stage, set()).add(name)
        parts = [replace(p, summed=frozenset(found.get(s, ()))) for s, p in enumerate(self.parts)]
        return replace(self, parts=tuple(parts))


def forward_gives(part: Part) -> list[str]:
    """The names of what a part's forward gives, in its order."""
    return [s.name for s in _specs(part) if isinstance(s, StageValue) and not s.backward]


def backward_gives(part: Part) -> list[str]:
    """The names of what a part's backward gives, in its order."""
    return [s.name for s in _specs(part) if isinstance(s, StageValue) and s.backward]


def summed(part: Part) -> tuple[int, ...]:
    """The numbers of the backward's results that it adds to buffers."""
    return tuple(i for i, name in enumerate(backward_gives(part)) if name in part.summed)


def backward_parts(partition: Partition, stage: int) -> tuple[list[str], list[str]]:
    """What a stage's backward gives: what other stages wait for, and the rest."""
    urgent = {e.name for e in partition.edges if e.source == stage and e.backward}
    gives = backward_gives(partition.parts[stage])
    return [g for g in gives if g in urgent], [g for g in gives if g not in urgent]


def _specs(part: Part) -> tuple[Any, ...]:
    return meta(part.gm.graph.output_node()).results
