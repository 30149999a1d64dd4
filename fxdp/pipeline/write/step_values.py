"""Where the values of a step are computed, and the messages that bring them to other stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fxdp.errors import StageError
from fxdp.ir.graph.metadata import meta, placed_tensor
from fxdp.ir.types.sizes import fixed_by_data
from fxdp.pipeline.cut.partition import Part, Partition, Total
from fxdp.pipeline.write.step_graph import Message, StepGraph, ValueType


@dataclass
class StepValues:
    """The values of a step by name: totals of micro-batches, and results of parts that run once.

    `placement[stage]` is the rank of a stage.
    """

    step: StepGraph
    partition: Partition
    placement: Sequence[int]
    _brought: set[tuple[str, int]] = field(default_factory=set)

    @cached_property
    def _everywhere(self) -> frozenset[str]:
        """The values that each reading rank computes."""
        exchanges = (one.part for each in self.partition.rounds for one in each.exchange if one.stage is None)
        early = (self.partition.prologue, *exchanges, *self.partition.gathers)
        return frozenset(name for part in early if part is not None for name in part.gives)

    @cached_property
    def exchanged(self) -> dict[str, Total]:
        """The values that one stage computes between rounds."""
        parts = [one for each in self.partition.rounds for one in each.exchange if one.stage is not None]
        return {value.name: value for one in parts for value in _given(one.part, one.stage)}

    @cached_property
    def _at_the_end(self) -> dict[str, Total]:
        parts = enumerate(self.partition.epilogues)
        return {v.name: v for stage, part in parts if part is not None for v in _given(part, stage)}

    def source(self, name: str) -> Total | None:
        """Return where a value of the step is computed; None for a value that each reading rank computes."""
        if name in self._everywhere:
            return None
        for places in (self.exchanged, self.partition.totals, self._at_the_end):
            if name in places:
                return places[name]
        return None

    def home(self, name: str) -> int | None:
        """Return the rank on which a value of the step is computed."""
        source = self.source(name)
        return None if source is None else self.placement[source.stage]

    def type(self, source: Total) -> ValueType:
        """Return shape and dtype of a value on its rank.

        Raises
        ------
        StageError : the size follows from data, as of rows that a mask selects, and another stage reads them.
        """
        if any(map(fixed_by_data, source.type.shape)):
            nodes = (node for part in self.partition.everything for node in part.gm.graph.nodes)
            at = next((meta(node).location for node in nodes if node.name == source.name), "")
            raise StageError(
                f"fxdp.Bitwise with stages: how many rows there are at {at} follows from the data, and "
                "another stage reads them; let stages begin elsewhere, fxdp.Pipeline(stages=[...]), or use a "
                "mesh without pp"
            )
        return self.step.shape(source.type, source.placement, None), source.type.dtype

    def bring(self, name: str, stage: int) -> None:
        """Send a value of the step to the rank of the stage that reads the value, once."""
        source, there = self.source(name), self.placement[stage]
        if source is None or (name, there) in self._brought:
            return
        here = self.placement[source.stage]
        if here == there:
            return
        self._brought.add((name, there))
        self.step.tag += 1
        message = Message(name, *self.type(source), self.step.tag, backward=True)
        if self.step.rank == here:
            self.step.send(message, self.step.value(name, None), there)
        elif self.step.rank == there:
            self.step.expect(name, None, self.step.receive(message, here))


def _given(part: Part, stage: int | None) -> Iterator[Total]:
    assert stage is not None
    values: Any = part.gm.graph.output_node().args[0]
    for name, node in zip(part.gives, values, strict=True):
        if not isinstance(meta(node).placement, tuple):  # only its own rank reads an op's several results
            yield Total(name, stage, False, *placed_tensor(node))
