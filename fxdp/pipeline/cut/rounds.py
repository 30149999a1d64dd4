"""Cut a step over blocks into rounds: ops that run in one block after the other, then ops that run once.

    round 0   in each block: terms of sums over inputs     once: the number of tokens that count
    round 1   in each block: up to a BatchNorm's moments   once: mean and variance of the global batch
    ...
    last      in each block: what is left                  once: the loss, the gradients (the epilogue)

A sum or a gather over samples needs all blocks, and the blocks go on with the result. The ops of a block have
the same samples and shapes on every mesh, and what runs once reads full values, which are equal on all ranks:
so neither has bits that depend on the mesh. The ops keep their order, so no value lives longer than without
blocks.
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
    last : the last round, which runs as stages, and after which the epilogue runs.
    coupled : collectives that blocks wait for in the midst of the model: the forward and the backward of a
        block cannot run one after the other.
    """

    blocks: dict[fx.Node, int] = field(default_factory=dict)
    once: dict[fx.Node, int] = field(default_factory=dict)
    terms: dict[fx.Node, int] = field(default_factory=dict)
    last: int = 0
    coupled: list[fx.Node] = field(default_factory=list)

    def is_ahead(self, node: fx.Node) -> bool:
        """Return whether a round before the last computes the node."""
        return node in self.once or self.blocks.get(node, self.last) < self.last


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
        found.last = 1 + max(found.once.values(), default=-1)
        for node in others if found.coupled else ():
            if not self._take_once(node):
                ready = max(self._ready(node), default=0)
                found.last = max(found.last, ready)
                # terms of sums are small, and early ones travel together
                found.blocks[node] = ready if _is_term(node) else found.last
        return found

    def _take_once(self, node: fx.Node) -> bool:
        """Record a node that runs once; return False for any other."""
        once = self._runs_once(node)
        if once:
            self.found.once[node] = at = max(self._made(node), default=0)
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
    for node in graph.nodes:
        meta(node).backward = False
