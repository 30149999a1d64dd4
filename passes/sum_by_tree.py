"""Sum the values of blocks over the ranks in the order of one tree, instead of the order of a transport."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.ops import collectives
from fxdp.ir.ops.parameter_shards import start_reduce_scatter_shards
from fxdp.ir.ops.sum_tree import (
    RankRoots,
    finish_tree_moments,
    finish_tree_scatter,
    finish_tree_sum,
    start_tree_moments,
    start_tree_scatter,
    start_tree_sum,
)
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, Partial


class _TreeSums:
    def __init__(self, graph: fx.Graph, group: str, roots: RankRoots) -> None:
        self.graph, self.group, self.roots = graph, group, roots
        # a rank without blocks passes one value, which no sum counts
        self.count = max(1, len(roots.own))
        self.found: dict[fx.Node, list[fx.Node]] = {}
        """The roots of each value that is to be summed."""

    def run(self) -> None:
        for node in list(self.graph.nodes):
            summed = [a for a in node.all_input_nodes if a in self.found]
            if node.op == "placeholder":
                if meta(node).placement in (P, Partial("moments")):
                    self.found[node] = self._items(node)
            elif summed and node.target is collectives.start_all_reduce:
                self._reduce(node)
            elif summed and node.target is collectives.start_moments:
                self._gather(node)
            elif summed and node.target is start_reduce_scatter_shards:
                self._scatter(node)
            elif summed:
                self.found[node] = [self._moved(node, i) for i in range(self.count)]
        for node in reversed(self.found):
            if node.op != "placeholder":
                self.graph.erase_node(node)

    def _items(self, node: fx.Node) -> list[fx.Node]:
        with self.graph.inserting_before(node.next):
            made = [self.graph.call_function(operator.getitem, (node, i)) for i in range(self.count)]
        for item in made:
            copy_meta(node, item, spec=None, operands=())
        return made

    def _moved(self, node: fx.Node, index: int) -> fx.Node:
        """Return the copy of a view or a concatenation for one root."""
        with self.graph.inserting_before(node):
            made = self.graph.node_copy(node, lambda a: self.found[a][index] if a in self.found else a)
        copy_meta(node, made)
        return made

    def _reduce(self, start: fx.Node) -> None:
        (finish,) = start.users
        values = self.found[start.args[0]]  # type: ignore[index]
        start.target, start.args = start_tree_sum, (values, self.roots, self.group)
        finish.target, finish.args = finish_tree_sum, (start, values[0], self.roots, self.group)

    def _gather(self, start: fx.Node) -> None:
        (finish,) = start.users
        values = self.found[start.args[0]]  # type: ignore[index]
        start.target, start.args = start_tree_moments, (values, self.roots, self.group)
        finish.target, finish.args = finish_tree_moments, (start, values[0], self.roots)

    def _scatter(self, start: fx.Node) -> None:
        (finish,) = [user for user in start.users if user.target is collectives.finish]
        members, sizes, _, _, after = start.args
        values = [[self.found[member][i] for member in members] for i in range(self.count)]  # type: ignore[union-attr,index]
        start.target, start.args = start_tree_scatter, (values, sizes, self.roots, self.group, after)
        finish.target, finish.args = finish_tree_scatter, (start, values[0][0], sizes, self.roots)


@dataclass(frozen=True)
class SumByTree:
    """Let each all-reduce of sums over blocks finish the tree of `fxdp/ir/ops/sum_tree.py`.

    before: `%flat = reshape(%mm, [20])`, `%start = start_all_reduce(%flat, sum, 3)`, `finish(%start)`
    after:  `%item = %mm[0]`, `%flat_1 = reshape(%item, [20])`, and so on for each root of this rank,
            `%start = start_tree_sum([%flat_1, ...], ..)`, `finish_tree_sum(%start, %flat_1, ..)`

    A value to be summed comes as the tuple of this rank's roots.

    Parameters
    ----------
    batches : the batch size of each data rank.
    block : the number of samples in a block.
    """

    batches: tuple[int, ...]
    block: int

    name = "sum-by-tree"
    requires = Level.EMITTED
    ensures = Level.EMITTED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place; on one data rank, values come as full sums."""
        if mesh.size > 1:
            roots = RankRoots.of(self.batches, self.block, mesh.rank)
            _TreeSums(gm.graph, mesh.group("reduce"), roots).run()
        return gm
