"""Write the rounds of a step over blocks: parts for each block, then parts that run once.

    %round_1_turn_0_mb0 = round_1_turn_0(%block_0, ..)          stage 0, and sends to stage 1
    %round_1_turn_0_mb1 = round_1_turn_0(%block_1, ..)
    ...
    %exchange_1 = exchange_1(%batch, (%moments_1_0, ..))        of all blocks: what the next round reads

All ranks walk the same order and each writes its own share, so a send and the matching receive are written
at the same position of that order: no rank waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from fxdp.ir.graph.metadata import placed_tensor
from fxdp.pipeline.cut.partition import Partition, StagePart
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import Message, StepGraph, suffix
from fxdp.pipeline.write.step_values import StepValues
from fxdp.pipeline.write.totals import Totals


@dataclass
class RoundCalls:
    """Writer of the rounds.

    Parameters
    ----------
    placement : the rank of each stage.
    full : the full local batch, `batch` a block of it.
    """

    step: StepGraph
    partition: Partition
    placement: Sequence[int]
    layout: MicrobatchSizes
    totals: Totals
    values: StepValues
    full: fx.Node
    batch: Callable[[int], fx.Node]

    def write(self) -> None:
        """Write all rounds."""
        for one in self.partition.rounds:
            for called in one.blocks:
                self._blocks(called)
            if one.blocks:  # after the last round the epilogue reads them, and no block
                self.totals.put_together(exchanged=bool(one.exchange))
            for called in one.exchange:
                self._exchange(called)

    def _is_own(self, called: StagePart) -> bool:
        return called.stage is None or self.placement[called.stage] == self.step.rank

    def _bring(self, called: StagePart) -> None:
        """Bring what a part reads of other stages' exchanges."""
        if called.stage is None:
            return
        for crossing in called.part.reads:
            if crossing.name in self.values.exchanged:
                self.values.bring(crossing.name, called.stage)

    def _exchange(self, called: StagePart) -> None:
        self._bring(called)
        if self._is_own(called):
            totals = [self.step.total(c.name) for c in called.part.reads]
            name = called.name.replace(" ", "_")
            self.step.keep_items(self.step.module(name, (self.full, *totals), name), called.part.gives)

    def _blocks(self, called: StagePart) -> None:
        self._bring(called)
        for index in range(self.layout.count):
            if self._is_own(called):
                self._block(called, index)
            if called.stage is not None:
                self._hand_on(called, called.stage, index)

    def _block(self, called: StagePart, index: int) -> None:
        args = [self.step.value(c.name, index) for c in called.part.reads]
        name = called.name.replace(" ", "_")
        made = self.step.module(name, (self.batch(index), *args), f"{name}{suffix(index)}")
        for place, given in enumerate(called.part.gives):
            value = self.step.item(made, place, f"{given}{suffix(index)}")
            self.step.keep(given, index, value)
            if given in self.partition.totals:
                self.totals.add(given, index, value)

    def _hand_on(self, called: StagePart, stage: int, index: int) -> None:
        """Send a block's values to the other ranks whose later parts read them."""
        here = self.placement[stage]
        values: Any = called.part.gm.graph.output_node().args[0]
        for name, node in zip(called.part.gives, values, strict=True):
            for there in sorted(self._readers.get(name, set()) - {here}):
                self.step.tag += 1
                type_, placement = placed_tensor(node)
                of_block = f"{name}{suffix(index)}", self.step.shape(type_, placement, index), type_.dtype
                message = Message(*of_block, self.step.tag, called.backward, row=name)
                if self.step.rank == here:
                    self.step.send(message, self.step.value(name, index), there)
                elif self.step.rank == there:
                    self.step.expect(name, index, self.step.receive(message, here))

    @cached_property
    def _readers(self) -> dict[str, set[int]]:
        """The ranks that read each value in their blocks."""
        found: dict[str, set[int]] = {}
        for called in (part for one in self.partition.rounds for part in one.blocks):
            if called.stage is not None:
                for crossing in called.part.reads:
                    found.setdefault(crossing.name, set()).add(self.placement[called.stage])
        return found
