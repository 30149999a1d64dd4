"""Cut a step over blocks into rounds: ops that run in one block after the other, then ops that run once.

    round 0   in each block: terms of sums over inputs     once: the number of tokens that count
    round 1   in each block: up to a BatchNorm's moments   once: mean and variance of the global batch
    ...
    last      in each block: what is left                  once: the loss, the gradients (the epilogue)

A sum or a gather over samples needs all blocks, and the blocks go on with the result. The ops of a block have
the same samples and shapes on every mesh, and what runs once reads full values, which are equal on all ranks:
so neither has bits that depend on the mesh. The ops keep their order, so no value lives longer than without
blocks. Stages divide a round once more: `round_parts.py` has the order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.graph.signature import Input, Tangent
from fxdp.ir.types.placements import Partial, R
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten


@dataclass
class Rounds:
    """The round of each op of a step over blocks.

    Attributes
    ----------
    blocks : the round of each op that runs in each block.
    once : the round of each op that runs once, after all blocks of the round.
    terms : operands of collectives that are computed from inputs alone, with the round that needs them.
    known : the number of rounds that need inputs alone; these come first, and run on every stage's rank.
    last : the last round, after which the epilogue runs; it runs as stages if nothing is coupled.
    coupled : collectives that blocks wait for in the midst of the model: the forward and the backward of a
        block cannot run one after the other.
    """

    blocks: dict[fx.Node, int] = field(default_factory=dict)
    once: dict[fx.Node, int] = field(default_factory=dict)
    terms: dict[fx.Node, int] = field(default_factory=dict)
    known: int = 0
    last: int = 0
    coupled: list[fx.Node] = field(default_factory=list)


def find_rounds(graph: fx.Graph, known: Collection[fx.Node], elsewhere: Collection[fx.Node]) -> Rounds:
    """Return the rounds of the ops of a program.

    Parameters
    ----------
    known : ops that depend on inputs alone; their collectives come first.
    elsewhere : ops of no round: views of parameters, and the epilogue.
    """
    return _Search(graph, set(known), set(elsewhere)).run()


class _Search:
    def __init__(self, graph: fx.Graph, known: set[fx.Node], elsewhere: set[fx.Node]) -> None:
        self.calls = [n for n in graph.nodes if n.op == "call_function" and n not in elsewhere]
        self.known = known
        self.found = Rounds()
        self.free: dict[fx.Node, int] = {}
        """The first round that can compute an op of inputs alone."""

    def run(self) -> Rounds:
        found = self.found
        for node in self.calls:
            if node in self.known and not self._take_once(node):
                self.free[node] = max(self._ready(node), default=0)
        others = [n for n in self.calls if n not in self.known]
        found.coupled = [n for n in others if n.target in redistributions.COLLECTIVES]
        found.last = found.known = 1 + max(found.once.values(), default=-1)
        for node in others if found.coupled else ():
            if not self._take_once(node):
                ready = max(found.known, *self._ready(node))
                found.last = max(found.last, ready)
                # terms of sums are small, and early ones travel together
                found.blocks[node] = ready if _is_term(node) else found.last
        return found

    def _take_once(self, node: fx.Node) -> bool:
        """Record a node that runs once; return False for any other."""
        once = self._runs_once(node)
        if once:
            self.found.once[node] = at = max(self.found.known, *self._made(node), 0)
            for operand in node.all_input_nodes if node.target in redistributions.COLLECTIVES else ():
                if operand in self.free:
                    self.found.terms[operand] = min(at, self.found.terms.get(operand, at))
        return once

    def _runs_once(self, node: fx.Node) -> bool:
        if node.target in redistributions.COLLECTIVES or node.target is redistributions.wait:
            return True
        if node.target is operator.getitem:
            return node.args[0] in self.found.once
        if not all(map(_is_full, (node, *node.all_input_nodes))):
            return False
        # random numbers without samples are drawn once for all blocks
        return node_draws(node) or any(a in self.found.once for a in node.all_input_nodes)

    def _made(self, node: fx.Node) -> Iterator[int]:
        """Yield the rounds that make the operands."""
        places = self.found.once, self.found.blocks, self.free
        return (place[a] for a in node.all_input_nodes for place in places if a in place)

    def _ready(self, node: fx.Node) -> Iterator[int]:
        """Yield the first rounds in which a block can read the operands."""
        found, free = self.found, self.free
        for operand in node.all_input_nodes:
            once = found.once.get(operand, -1)
            yield max(once + 1, found.blocks.get(operand, 0), free.get(operand, 0))


def _is_term(node: fx.Node) -> bool:
    return any(isinstance(placement, Partial) for placement in meta(node).placements)


def _is_full(node: fx.Node) -> bool:
    """Return whether all tensors of a value are replicated."""
    pairs = zip(meta(node).types, meta(node).placements, strict=False)
    return all(placement == R for type_, placement in pairs if isinstance(type_, TensorType))


def without_tangents(graph: fx.Graph) -> None:
    """Let the loss's tangent be 1, and the ops of the backward go on from the forward, in one graph."""
    for _, node in inputs_of(graph, Tangent):
        # on the device of an input
        beside = next(n for _, n in inputs_of(graph, Input) if isinstance(meta(n).type, TensorType))
        with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
            one = graph.call_function(aten.new_ones.default, (beside, []), {"dtype": tensor_type(node).dtype})
        copy_meta(node, one, spec=None, operands=(meta(beside).placement,))
        node.replace_all_uses_with(one)
        graph.erase_node(node)


def place_once(graph: fx.Graph, rounds: Rounds) -> None:
    """Give ops that run once per round the stage that runs them, or none in rounds of inputs alone.

    A collective runs where its operand is, because a rank has several roots of one sum. All else of a round
    runs in one place, so that no two stages wait for one another: the stage of the round's last collective.
    """
    homes: dict[int, int | None] = {}
    for node, number in rounds.once.items():
        meta(node).exchanged, meta(node).stage = True, None
        if number >= rounds.known and node.target in redistributions.COLLECTIVES:
            stages = (meta(operand).stage for operand in node.all_input_nodes)
            homes[number] = meta(node).stage = next((stage for stage in stages if stage is not None), 0)
    for node, number in rounds.once.items():
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target in (redistributions.wait, operator.getitem) and source in rounds.once:
            meta(node).stage = meta(source).stage
        elif number >= rounds.known and node.target not in redistributions.COLLECTIVES:
            meta(node).stage = homes.get(number, 0)
