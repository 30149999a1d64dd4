"""Build the parts of the rounds before the last: of each a part for a block, and a part that runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fxdp.ir.graph.signature import OutputSpec, StageValue
from fxdp.pipeline.cut.node_roles import is_cheap_view
from fxdp.pipeline.cut.part_builder import PartBuilder
from fxdp.pipeline.cut.partition import BlockRound, Part
from fxdp.pipeline.cut.phases import Phases


class RoundParts:
    """Parts of the rounds, built from the last to the first: each gives the values that later parts read.

    Attributes
    ----------
    crossing : the values that the parts read from one another, and full parameters.
    exchanged : the values of blocks that are read after all blocks of their round.
    """

    def __init__(self, gm: fx.GraphModule, phases: Phases, read: Iterable[fx.Node]) -> None:
        self._gm = gm
        self._rounds, self._gathered = phases.rounds, set(phases.gathered)
        self._order = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._read = set(read)
        self.crossing: set[fx.Node] = set()
        self.exchanged: set[fx.Node] = set()

    def build(self) -> tuple[BlockRound, ...]:
        """Return the rounds before the last."""
        return tuple(reversed([self._round(number) for number in reversed(range(self._rounds.last))]))

    def _round(self, number: int) -> BlockRound:
        once, terms = self._rounds.once, self._rounds.terms
        wanted = [n for n in self._read if once.get(n) == number]
        exchange, reads = self._part(wanted, lambda n: self._crosses_once(n, number), f"Exchange{number}")
        self.exchanged |= {n for n in reads if n not in once and n not in self._gathered}
        made = [n for n in self._read if self._rounds.blocks.get(n) == number or terms.get(n) == number]
        blocks, _ = self._part(made, lambda n: self._crosses_block(n, number), f"Blocks{number}")
        return BlockRound(blocks if made else None, exchange)

    def _crosses_once(self, node: fx.Node, number: int) -> bool:
        rounds = self._rounds
        if node in rounds.once:
            return rounds.once[node] != number
        return node in rounds.blocks or node in rounds.terms or node in self._gathered

    def _crosses_block(self, node: fx.Node, number: int) -> bool:
        if node in self._rounds.once or node in self._gathered:
            return True
        return self._rounds.blocks.get(node, number) < number and not is_cheap_view(node)

    def _part(
        self, wanted: Iterable[fx.Node], crosses: Callable[[fx.Node], bool], title: str
    ) -> tuple[Part, list[fx.Node]]:
        """Return the part that computes the wanted values, and the nodes of other parts that it reads."""
        roots = sorted(wanted, key=self._order.__getitem__)
        builder = PartBuilder(self._gm)
        builder.include(roots, lambda n: StageValue(n.name) if crosses(n) else None)
        results: list[tuple[OutputSpec, fx.Node]] = [(StageValue(n.name), n) for n in roots]
        reads = builder.reads()
        self._read |= set(reads)
        self.crossing |= set(reads)
        names = tuple(StageValue(n.name) for n in reads)
        return Part(builder.build(results, title), names, tuple(n.name for n in roots)), reads
