"""Build the parts of the rounds: of each one or more parts for a block, and parts that run once.

    round 2, two stages     in each block: forward of 0, forward and backward of 1, backward of 0
                            once: collectives of 0 and of 1, the other ops with those of one of these

A round of inputs alone has one part of each kind, which every stage's rank runs. If blocks wait for one
another in the midst of the model, the last round has parts for its blocks, too; otherwise it runs as stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import OutputSpec, StageValue
from fxdp.ir.redistributions import COLLECTIVES
from fxdp.pipeline.cut.node_roles import is_cheap_view, is_number
from fxdp.pipeline.cut.part_builder import PartBuilder
from fxdp.pipeline.cut.partition import BlockRound, Part, StagePart
from fxdp.pipeline.cut.phases import Phases
from fxdp.pipeline.schedule.action import Kind


class RoundParts:
    """Parts of the rounds, built from the last to the first: each gives the values that later parts read.

    Attributes
    ----------
    crossing : the values that the parts of each stage read from one another, and full parameters.
    exchanged : the values of blocks that are read after all blocks of their round.
    """

    def __init__(self, gm: fx.GraphModule, phases: Phases, stages: int, read: Iterable[fx.Node]) -> None:
        self._gm, self._phases = gm, phases
        self._rounds, self._gathered = phases.rounds, set(phases.gathered)
        self._last_stage = stages - 1
        self._order = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._places = {node: place for node in gm.graph.nodes if (place := self._place(node))}
        """Round and turn of the ops of blocks."""
        self._read = set(read)
        self.crossing: dict[int | None, set[fx.Node]] = {}
        self.exchanged: set[fx.Node] = set()

    def build(self) -> tuple[BlockRound, ...]:
        """Return all rounds that have parts of their own."""
        count = self._rounds.last + bool(self._rounds.coupled)
        return tuple(reversed([self._round(number) for number in reversed(range(count))]))

    def _round(self, number: int) -> BlockRound:
        exchange = [self._exchange(number, stage) for stage in reversed(self._exchanging(number))]
        turns = 1 if number < self._rounds.known else 2 * self._last_stage + 1
        blocks = [part for turn in reversed(range(turns)) for part in self._blocks(number, turn)]
        return BlockRound((*reversed(blocks),), (*reversed(exchange),))

    # ---- what runs once ------------------------------------------------------------------------------------

    def _exchanging(self, number: int) -> list[int | None]:
        """Return the stages with ops that run once after a round; the last one may read from the others."""
        own = [node for node, at in self._rounds.once.items() if at == number]
        collectives = (meta(node).stage for node in own if node.target in COLLECTIVES)
        stages = dict.fromkeys([*collectives, *(meta(node).stage for node in own)])
        last = [meta(node).stage for node in own if node.target in COLLECTIVES][-1:]
        return [*(stage for stage in stages if stage not in last), *last]

    def _exchange(self, number: int, stage: int | None) -> StagePart:
        once = self._rounds.once

        def is_own(node: fx.Node) -> bool:
            return once.get(node) == number and meta(node).stage == stage

        def crosses(node: fx.Node) -> bool:
            if node in once:
                return not is_own(node) and not is_number(node)
            return node in self._rounds.blocks or node in self._rounds.terms or node in self._gathered

        part, reads = self._part(filter(is_own, self._read), crosses, f"Exchange{number}", stage)
        self.exchanged |= {n for n in reads if n not in once and n not in self._gathered}
        of = "" if stage == self._exchanging(number)[-1] else f" of stage {stage}"
        return StagePart(f"exchange {number}{of}", stage, part)

    # ---- what runs in each block ---------------------------------------------------------------------------

    def _blocks(self, number: int, turn: int) -> Iterator[StagePart]:
        """Yield the part of a block's turn in a round, unless it is empty."""

        def crosses(node: fx.Node) -> bool:
            if node in self._rounds.once or node in self._gathered:
                return not is_number(node)
            # what inputs alone give is computed where it is read
            elsewhere = node in self._rounds.blocks and self._places[node] != (number, turn)
            return elsewhere and not is_cheap_view(node)

        made = [node for node in self._read if self._places.get(node) == (number, turn)]
        if not made:
            return
        ahead, stage = number < self._rounds.known, min(turn, 2 * self._last_stage - turn)
        part, _ = self._part(made, crosses, f"Blocks{number}", None if ahead else stage)
        name = f"round {number}" if not self._last_stage else f"round {number} turn {turn}"
        halves = {node in self._phases.backward for node in made}
        kinds = tuple(Kind.BACKWARD if half else Kind.FORWARD for half in sorted(halves))
        yield StagePart(name, None if ahead else stage, part, turn > self._last_stage, kinds)

    def _place(self, node: fx.Node) -> tuple[int, int] | None:
        """Return round and turn of an op; None if it does not run in blocks."""
        rounds = self._rounds
        if node in rounds.terms:
            return rounds.terms[node], 0
        if node not in rounds.blocks and not self._phases.is_own(node):
            return None
        stage = meta(node).stage or 0
        back = meta(node).backward and stage < self._last_stage
        # results of inputs alone come last
        return rounds.blocks.get(node, rounds.last), 2 * self._last_stage - stage if back else stage

    # ---- both ----------------------------------------------------------------------------------------------

    def _part(
        self, wanted: Iterable[fx.Node], crosses: Callable[[fx.Node], bool], title: str, stage: int | None
    ) -> tuple[Part, list[fx.Node]]:
        """Return the part that computes the wanted values, and the nodes of other parts that it reads."""
        roots = sorted(wanted, key=self._order.__getitem__)
        builder = PartBuilder(self._gm)
        builder.include(roots, lambda n: StageValue(n.name) if crosses(n) else None)
        results: list[tuple[OutputSpec, fx.Node]] = [(StageValue(n.name), n) for n in roots]
        reads = builder.reads()
        self._read |= set(reads)
        self.crossing.setdefault(stage, set()).update(reads)
        gm = builder.build(results, title)
        for node in gm.graph.nodes:
            meta(node).backward = False  # one part does not differentiate another
        names = tuple(StageValue(n.name) for n in reads)
        return Part(gm, names, tuple(n.name for n in roots)), reads
